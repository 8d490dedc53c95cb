"""Triton's interpreter without its waste, which is two thirds of the time of a small launch. Kernels compute what they did.

At every call of a helper such as `tl.sum` it looks through all of `triton.language` for functions to replace; here it does that
once a launch. For every integer operation it computes whether int32 overflowed, and throws the answer away unless it is in debug
mode; here it does not.
"""

from dataclasses import replace
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

from kvdb.attention.triton.pages import INTERPRETED


def speed_up() -> None:
    """Lasts until the process ends. Does nothing where kernels are compiled, or where Triton's interpreter is built otherwise
    than in the version that the tests run with."""
    names = "_LangPatchScope", "_patch_lang", "interpreter_builder"
    if not INTERPRETED or not all(hasattr(interpreter, name) for name in names):
        return
    if getattr(interpreter._patch_lang, "once", False):
        return
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)


def _once_a_launch(patch):
    nothing_changed, both = interpreter._LangPatchScope(), SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    state = SimpleNamespace(patched=False)

    class Once(interpreter._LangPatchScope):
        def restore(self):
            state.patched = False
            self.inner.restore()

    def patch_lang(_):
        if state.patched:
            return nothing_changed
        scope = Once()
        scope.inner = patch(both)
        state.patched = True
        return scope

    patch_lang.once = True
    return patch_lang
