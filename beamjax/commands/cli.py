"""The command `beamjax`: a table of commands, each in a module of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from beamjax._text import hint
from beamjax._version import __version__
from beamjax.errors import BeamjaxError

COMMANDS = {
    "run": ("beamjax.commands.run", "run a function on this machine or a Beam runner"),
    "verify": ("beamjax.commands.verify", "compare the answer of a runner with that of jax.jit"),
    "explain": ("beamjax.commands.explain", "what a function becomes: steps, passes, bytes"),
    "bench": ("beamjax.commands.bench", "how long a function takes on runners and under jax.jit"),
    "jobs": ("beamjax.commands.jobs", "list, show, cancel, resume, replay or compare jobs"),
    "cache": ("beamjax.commands.cache", "what a folder of the option cache holds, or clear it"),
    "completion": ("beamjax.commands.completion", "a script for bash, zsh or fish"),
    "doctor": ("beamjax.commands.doctor", "what this machine can run, and what it lacks"),
    "flink": (
        "beamjax.pipelines.clusters.flink_command",
        "a Flink cluster on this machine for Beam",
    ),
    "prism": ("beamjax.pipelines.runners.prism", "Beam's Prism, which runner='PrismRunner' needs"),
}
"""Module and purpose by name; the module has `add_arguments(parser)` and `command(args) -> int`,
and `takes_flags` if it hands on what it does not know (`args.flags`) to Beam."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its name and arguments; by default those of this process.

    Returns:
      The exit status: 0; 1 where the command failed and said why, or found a difference; 2 for
      wrong arguments; 130 for an interrupt.
    """
    try:
        arguments = parsed(sys.argv[1:] if argv is None else list(argv))
        status = int(arguments.command(arguments))
        sys.stdout.flush()
        return status
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 2
    except BeamjaxError as error:
        print(f"beamjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parsed(argv: list[str]) -> argparse.Namespace:
    """The arguments of a command line.

    Raises:
      SystemExit: they are wrong, or ask for help.
    """
    parser = argparse.ArgumentParser(prog="beamjax", description="JAX programs on Apache Beam.")
    parser.add_argument("--version", action="version", version=f"beamjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    takes_flags = False
    for name, (module, purpose) in COMMANDS.items():
        subparser = commands.add_parser(name, help=purpose, description=purpose)
        # The modules of others may need what is not installed, and take long to import.
        if name in argv[:1]:
            found = importlib.import_module(module)
            found.add_arguments(subparser)
            subparser.set_defaults(command=found.command)
            takes_flags = getattr(found, "takes_flags", False)
    if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
        parser.error(f"found no command {argv[0]!r}{hint(argv[0], COMMANDS)}")
    return _parsed(parser, argv, takes_flags)


def _parsed(
    parser: argparse.ArgumentParser, argv: list[str], takes_flags: bool
) -> argparse.Namespace:
    """The arguments; with what the command does not know in `flags`, if it takes them."""
    if not takes_flags:
        return parser.parse_args(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments, flags = parser.parse_known_args(argv[:cut])
    arguments.flags, arguments.beam_flags, arguments.argv = flags, argv[cut + 1 :], argv
    return arguments


if __name__ == "__main__":
    sys.exit(main())
