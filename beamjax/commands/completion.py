"""`beamjax completion`: a script that completes commands, flags and their values in a shell."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from beamjax.commands.arguments.flags import option_choices
from beamjax.commands.checks import RUNNERS
from beamjax.errors import OptionsError

SHELLS = ("bash", "zsh", "fish")
HOW = """\
bash:  eval "$(beamjax completion bash)", in ~/.bashrc
zsh:   beamjax completion zsh > a file _beamjax in a folder of $fpath
fish:  beamjax completion fish > ~/.config/fish/completions/beamjax.fish
"""
_FOLDERS = ("job_folder", "work_folder", "checkpoint", "folder", "job")
_FILES = ("target", "out", "dead_letters", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax completion`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HOW
    parser.add_argument("shell", choices=SHELLS, help="whose script is printed")


def command(arguments: argparse.Namespace) -> int:
    """Prints the script.

    Raises:
      OptionsError: the package that makes it is not installed.
    """
    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        raise OptionsError(
            "completion: found no package shtab, which makes the script; "
            "pip install 'beamjax[completion]'"
        ) from error
    print(shtab.complete(_whole_parser(shtab), arguments.shell))
    return 0


def _whole_parser(shtab: Any) -> argparse.ArgumentParser:
    """All commands with what their values may be, which parsing itself leaves open."""
    from beamjax.commands.cli import COMMANDS

    parser = argparse.ArgumentParser(prog="beamjax")
    parser.add_argument("--version", action="version", version="")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (module, purpose) in COMMANDS.items():
        subparser = commands.add_parser(name, help=purpose, description=purpose)
        importlib.import_module(module).add_arguments(subparser)
        subparser.usage = None
        _hint(subparser, shtab)
    return parser


def _hint(parser: argparse.ArgumentParser, shtab: Any) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _hint(inner, shtab)
        elif action.dest == "runner":
            action.choices = ["local", "DirectRunner", *RUNNERS]
        elif option_choices(action.dest):
            action.choices = option_choices(action.dest)
        elif action.dest in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
