"""Triton's interpreter without its waste, which is two thirds of the time of a small launch. Kernels compute what they did.

At every call of a helper such as `tl.sum` it looks through all of `triton.language` for functions to replace; here it does that
once a launch. For every integer operation it computes whether int32 overflowed, and throws the answer away unless it is in debug
mode; here it does not. For every value it works out its type, its shape and its numpy dtype; here it does once for each of them.
"""

from dataclasses import replace
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

from kvdb.attention.triton.pages import INTERPRETED


def speed_up() -> None:
    """Lasts until the process ends. Does nothing where kernels are compiled, or where Triton's interpreter is built otherwise
    than in the version that the tests run with."""
    names = "_LangPatchScope", "_get_np_dtype", "_patch_lang", "interpreter_builder"
    if not INTERPRETED or not all(hasattr(interpreter, name) for name in names):
        return
    if getattr(interpreter._patch_lang, "once", False):
        return
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_for_each(lambda type_: type_.name, interpreter._get_np_dtype)
    tl.block_type.__init__ = _block_type(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor(tl.tensor.__init__)


def _once_for_each(key_of, function):
    known = {}

    def remembered(*given):
        key = key_of(*given)
        if key not in known:
            known[key] = function(*given)
        return known[key]

    return remembered


def _block_type(make):
    """The constructor of a type: equal types have equal fields."""
    known = {}

    def init(self, element_ty, shape):
        key = element_ty.name, getattr(element_ty, "address_space", ""), *map(tl.core._unwrap_if_constexpr, shape)
        if key in known:
            vars(self).update(known[key])
        else:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))

    return init


def _tensor(make):
    """The constructor of a value: values of one type have one shape."""
    known = {}

    def init(self, handle, type_):
        if type_.name in known:
            self.handle, self.type, self.dtype = handle, type_, type_.scalar
            self.shape, self.numel = known[type_.name]
        else:
            make(self, handle, type_)
            known[type_.name] = self.shape, self.numel

    return init


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
