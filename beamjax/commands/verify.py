"""`beamjax verify`: the answer of a runner against that of `jax.jit`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from beamjax.commands.answers import DONE, FAILED, Answer, give
from beamjax.commands.arguments import flags

if TYPE_CHECKING:
    from beamjax.verification import VerificationReport

takes_flags = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax verify`."""
    flags.add_call(parser)
    for name in ("rtol", "atol"):
        parser.add_argument(
            f"--{name}", type=float, metavar="X", help="for float leaves, as of beamjax.verify"
        )


def command(arguments: argparse.Namespace) -> int:
    """Compares; returns 1 if a leaf is past its tolerance."""
    return give(arguments, lambda: _verify(arguments))


def _verify(arguments: argparse.Namespace) -> Answer:
    from beamjax.commands.arguments.binding import find_call, with_files
    from beamjax.errors import VerificationError
    from beamjax.verification import ADVICE, verify

    options, make_call = find_call(arguments)
    call = with_files(make_call(), options)
    try:
        report = verify(
            call.fn, *call.args, runner=arguments.runner, options=options,
            rtol=arguments.rtol, atol=arguments.atol,
        )  # fmt: skip
    except VerificationError as error:
        if error.report is None:
            raise
        report = error.report
    text = _text(report)
    if not report.ok:
        failures = [row.failure() for row in report.rows if not row.passed]
        text = "\n".join([text, *failures, ADVICE])
    return Answer(_data(report), text, DONE if report.ok else FAILED)


def _data(report: VerificationReport) -> dict[str, Any]:
    rows = [{**vars(row), "passed": row.passed} for row in report.rows]
    return {"program": report.program, "runner": report.runner, "leaves": rows}


def _text(report: VerificationReport) -> str:
    """A table of `rich` in a terminal, plain text elsewhere."""
    if not sys.stdout.isatty():
        return str(report)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from beamjax.verification import HEADINGS

    table = Table(*HEADINGS, box=None)
    for row in report.rows:
        table.add_row(*map(Text, row.cells()), style="" if row.passed else "red")
    console = Console()
    with console.capture() as captured:
        console.print(table)
    return f"{report.headline}\n{captured.get().rstrip()}"
