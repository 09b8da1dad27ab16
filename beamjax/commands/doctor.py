"""`beamjax doctor`: what a machine or an image can run, what is missing, and how to fix it."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from beamjax.commands import checks
from beamjax.commands.checks import ABSENT, FAILED, OK, WARNING, Finding
from beamjax.options import REQUIRED


def examine(
    require_platform: str | None = None,
    require_runners: Sequence[str] = (),
    work_folder: str | None = None,
    measure: bool = False,
) -> Iterator[Finding]:
    """Looks at this machine, without opening its devices in this process unless it is measured.

    Args:
      require_platform: as the option; anything else is a failure.
      require_runners: names of Beam runners that must be usable.
      work_folder: the option of a run, also a URL.
      measure: whether to measure how fast the machine is.

    Yields:
      What was found, as soon as it is.
    """
    yield checks.check_python()
    yield from checks.check_packages()
    yield from checks.check_jaxlib()
    yield from checks.check_environment()
    yield from checks.check_devices(require_platform)
    if measure:
        yield check_speed()
    yield checks.check_folder(tempfile.gettempdir(), "temporary folder")
    if work_folder is not None:
        yield checks.check_folder(work_folder, "work folder")
    yield from checks.check_runners(require_runners)


def check_speed() -> Finding:
    """How fast this machine is; measured if it never was, which opens its devices."""
    from beamjax.commands.measure import calibrated

    known = calibrated()
    rates = known.rates
    found = (
        f"{rates.flops / 1e9:.3g} GFLOP/s in bodies, {rates.nbytes / 1e9:.3g} GB/s, "
        f"{1e6 * rates.shard:.3g} us a shard, merges {known.merge / 1e6:.3g} MB/s"
    )
    return Finding("speed", OK, found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--require-platform", choices=list(REQUIRED), help="fail if JAX computes on another one"
    )
    parser.add_argument(
        "--require-runner", action="append", default=[], choices=list(checks.RUNNERS),
        help="fail if this runner can't be used from here",
    )  # fmt: skip
    parser.add_argument(
        "--measure", action="store_true", help="measure how fast this machine is, and keep that"
    )
    parser.add_argument("--work-folder", help="a folder or URL for the option work_folder")


def command(arguments: argparse.Namespace) -> int:
    """Prints what is found; returns 1 if something that is needed is missing."""
    found = examine(
        arguments.require_platform,
        arguments.require_runner,
        arguments.work_folder,
        arguments.measure,
    )
    findings = []
    for finding in found:
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    failed = [finding.name for finding in findings if finding.status == FAILED]
    if arguments.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        print(
            f"\n{len(failed)} to mend: {', '.join(failed)}"
            if failed
            else "\nall that is needed is there"
        )
    return 1 if failed else 0


_MARKS = {OK: "ok     ", WARNING: "warning", FAILED: "FAILED ", ABSENT: "-      "}


def _line(finding: Finding) -> str:
    line = f"{_MARKS[finding.status]}  {finding.name}: {finding.found}"
    return f"{line}\n{'':9}-> {finding.mend}" if finding.mend else line
