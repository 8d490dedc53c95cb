"""`kvdb completion`: a script by which a shell completes commands and flags."""

import argparse
from typing import TYPE_CHECKING

from kvdb.commands.arguments import sentence
from kvdb.errors import Unsupported

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SHELLS = ("bash", "zsh", "fish")


def add(commands: "Subparsers") -> None:
    """Add `completion` to the `kvdb` command."""
    what = "print a script by which a shell completes commands and flags"
    parser = commands.add_parser(
        "completion", help=what, description=f'{sentence(what)} For bash: eval "$(kvdb completion bash)"'
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=_completion)


def _completion(given: argparse.Namespace) -> int:
    try:
        import shtab  # which nothing else needs
    except ModuleNotFoundError:
        raise Unsupported("kvdb completion needs shtab, which is not installed; pip install shtab") from None

    _show_settings(given.parser)
    print(shtab.complete(given.parser, given.shell))
    return 0


def _show_settings(parser: argparse.ArgumentParser) -> None:
    """Give the flags of settings, which --help leaves out, a help text, here and in the commands below, because completion
    lists what has one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _show_settings(command)
        elif action.help == argparse.SUPPRESS:
            action.help = action.dest
