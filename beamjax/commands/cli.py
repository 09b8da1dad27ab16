"""The command `beamjax` and its subcommands, whose modules import JAX only when they run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from beamjax._version import __version__
from beamjax.commands.answers import WRONG
from beamjax.commands.clusters import flink, prism
from beamjax.commands.doctor import doctor
from beamjax.commands.functions import explain, run, verify
from beamjax.commands.jobs import jobs


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="beamjax %(version)s")
def beamjax() -> None:
    """Run JAX programs on Apache Beam."""


for command in (run, verify, explain, jobs, doctor, flink, prism):
    beamjax.add_command(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, by default that of this process; returns the exit status."""
    try:
        beamjax.main(None if argv is None else list(argv), prog_name="beamjax")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else WRONG
    return 0


if __name__ == "__main__":
    sys.exit(main())
