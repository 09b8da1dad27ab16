"""The command `beamjax`: a table of commands, each in a module of its own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from beamjax._version import __version__
from beamjax.errors import BeamjaxError

COMMANDS = {
    "doctor": ("beamjax.doctor", "what this machine can run, and what it lacks"),
    "flink": ("beamjax.pipelines.flink_command", "a Flink cluster on this machine for Beam"),
    "prism": ("beamjax.pipelines.prism", "Beam's Prism, which runner='PrismRunner' needs"),
}
"""Module and purpose by name; the module has `add_arguments(parser)` and `command(args) -> int`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its name and arguments; by default those of this process.

    Returns:
      The exit status: 0, 1 where the command failed and said why, 2 for wrong arguments.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="beamjax", description=__doc__)
    parser.add_argument("--version", action="version", version=f"beamjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, purpose) in COMMANDS.items():
        subparser = commands.add_parser(name, help=purpose, description=purpose)
        # The modules of others may need what is not installed, and take long to import.
        if name in argv[:1]:
            found = importlib.import_module(module)
            found.add_arguments(subparser)
            subparser.set_defaults(command=found.command)
    try:
        arguments = parser.parse_args(argv)
        return int(arguments.command(arguments))
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 2
    except BeamjaxError as error:
        print(f"beamjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
