"""`kvdb completion`: a script by which a shell completes commands and flags."""

import argparse

from kvdb.commands.arguments import Subparsers, add_command
from kvdb.errors import Unsupported

SHELLS = ("bash", "zsh", "fish")


def add(commands: Subparsers) -> None:
    """Add `completion` to the `kvdb` command."""
    what = "print a script by which a shell completes commands and flags"
    more = '. For bash: eval "$(kvdb completion bash)"'
    parser = add_command(commands, "completion", what, _completion, more=more)
    parser.add_argument("shell", choices=SHELLS, help="the shell")


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
