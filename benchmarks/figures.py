"""The numbers that README and the documentation state.

    python -m benchmarks.figures    # prints each figure, and what a page states differently

Each figure is computed from `measured.json`, which holds what was measured, when, and by which
command. After a new measurement, replace that file, run this, and change the pages that it names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = Path(__file__).with_name("measured.json")

CLAIMS = {
    "README.md": (
        "take {exact} times as long as plain addition",
        "beamjax on DirectRunner is {element} times faster than hand-written Beam with one element "
        "per member, and {ray} times faster than Ray Data. It is {dask} times as fast as Dask, and "
        "a call in a session is {dask_session} times as fast as Dask",
        "A run on DirectRunner takes about {pipeline} ms more than a call in a session",
        "takes {round_more} ms more than on `local`",
    ),
    "docs/index.md": (
        "beamjax on DirectRunner is {element} times faster than hand-written Beam with one element "
        "per member, and {ray} times faster than Ray Data with two workers. It is {dask} times as "
        "fast as Dask with two workers, and a call in a session is {dask_session} times as fast",
        "| Exact sums, for the same bits on any runner | take {exact} times as long as plain "
        "addition |",
        '| 100 rounds of small work | take {rounds_local} s with `runner="local"` |',
        "| A run on DirectRunner | takes about {pipeline} ms more than a call in a session |",
    ),
    "docs/why.md": (
        "take less than {rounds_drjax} ms with DrJAX, {rounds_local} s with beamjax on `local`, "
        "and {rounds_direct} s on DirectRunner",
        "beamjax on DirectRunner was {ray} times faster than Ray Data with two workers",
        "beamjax on DirectRunner is {dask} times as fast as Dask with two workers",
        "is {dask_session} times as fast as Dask",
        "For 100 small rounds, DirectRunner is {dask_rounds} times as fast",
        "beamjax on DirectRunner was {element} times faster than hand-written Beam with one "
        "element per member, and {batch} times faster than with `BatchElements`",
        "A run on DirectRunner takes about {pipeline} ms more than a call in a session",
    ),
    "docs/howto/iterative.md": (
        "The computation itself takes {round_local} ms",
        "{rounds_table}",
    ),
    "docs/howto/weights.md": (
        "300 refits take {refits} times as long",
        "a refit without each client would take {leaving_out} times as long",
    ),
    "docs/howto/replay.md": ("from the first takes {replay} times as long",),
}
"""What each page states, with the names of figures in place of their numbers."""

ROUNDS_ON = {
    "local": "local",
    "DirectRunner": "DirectRunner",
    "PrismRunner": "Prism",
    "FlinkRunner": "Flink, a local cluster",
    "SparkRunner": "Spark, in its job server",
}


def figures(measured: Mapping[str, Any]) -> dict[str, str]:
    """Each figure by its name, as pages write it."""
    cases = {
        case: {
            row["way"]: row["seconds"] for row in found["rows"] if row.get("seconds") is not None
        }
        for case, found in measured["suite"]["cases"].items()
    }
    rounds = measured["rounds"]["milliseconds"]
    times = measured["capabilities"]["times as long"]
    return {
        "element": _range(_ratios(cases, "element", "direct")),
        "batch": _range(_ratios(cases, "batch", "direct")),
        "ray": _range(_ratios(cases, "ray-2", "direct")),
        "dask": _range(_ratios(cases, "dask-2", "direct")),
        "dask_session": _range(_ratios(cases, "dask-2", "session")),
        "dask_rounds": number(cases["G"]["dask-2"] / cases["G"]["direct"]),
        "exact": _range(
            [*_ratios(cases, "local", "local-plain"), *_ratios(cases, "direct", "direct-plain")]
        ),
        "pipeline": number(1000 * (cases["A"]["direct"] - cases["A"]["session"])),
        "rounds_drjax": str(1 + int(1000 * cases["G"]["drjax"])),
        "rounds_local": f"{cases['G']['local']:.2f}",
        "rounds_direct": f"{cases['G']['direct']:.2f}",
        "round_local": f"{rounds['local']['round']:.1f}",
        "round_more": f"{rounds['DirectRunner']['round'] - rounds['local']['round']:.0f}",
        "rounds_table": " ".join(
            f"| {ROUNDS_ON[runner]} | {found['round']} | {found['session']} |"
            for runner, found in rounds.items()
        ),
        "refits": _range(times["refits"]),
        "leaving_out": _range(times["leaving out"]),
        "replay": _range(times["replay"]),
    }


def missing(measured: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """The claims, with their numbers, that a page does not state."""
    numbers = figures(measured)
    return [
        f"{page}: expected {claim.format(**numbers)!r}"
        for page, claims in CLAIMS.items()
        for claim in claims
        if claim.format(**numbers) not in " ".join((root / page).read_text("utf-8").split())
    ]


def _ratios(cases: Mapping[str, Mapping[str, float]], way: str, base: str) -> Iterable[float]:
    return [found[way] / found[base] for found in cases.values() if {way, base} <= found.keys()]


def _range(values: Iterable[float]) -> str:
    low, high = min(values), max(values)
    return f"{number(low)} to {number(high)}"


def number(value: float) -> str:
    """Two significant digits."""
    if value >= 10:
        digits = len(str(int(value))) - 2
        return f"{round(value, -digits):,.0f}"
    return f"{value:.1f}"


def main() -> int:
    measured = json.loads(MEASURED.read_text("utf-8"))
    for name, text in figures(measured).items():
        print(f"{name:14} {text}")
    faults = missing(measured)
    print(*faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
