"""The numbers that README and the documentation state.

    python -m benchmarks.figures    # prints each figure, and what a page states differently

Each figure is computed from `measured.json` and `growth.json`, which hold what was measured, when,
and by which command. After a new measurement, replace these files, run this, and change the pages
that it names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = Path(__file__).with_name("measured.json")
GROWTH = Path(__file__).with_name("growth.json")

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
    "docs/scaling.md": (
        "A shard costs {shard_local} ms on `local` and {shard_flink} ms on Flink",
        "takes {grown} times the memory for 10^6 shards as for 10^3",
        "{file_sum} ms to sum, most of it in Arrow, and {file_open} ms to open",
        "{file_memory} kB for each",
        "{files_memory} GB in the launching process, and {files_seconds} s to open and sum them",
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
        **growth(measured["growth"]),
    }


def growth(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Figures of what `benchmarks/growth.py` records."""
    shards, files = (
        {(r["runner"], r["count"]): r for r in rows if r["job"] == job}
        for job in ("shards", "files")
    )
    least, most = 1_000, 1_000_000
    runners = dict.fromkeys(runner for runner, _ in shards)
    local = {count: row for (runner, count), row in files.items() if runner == "local"}
    few, many = local.pop(least), max(local)
    kilobytes = [
        1.024 * 1024 * (row["launcher"] - few["launcher"]) / (n - least) for n, row in local.items()
    ]
    return {
        "shard_local": f"{1e3 * shards['local', most]['seconds'] / most:.2f}",
        "shard_flink": f"{1e3 * shards['Flink cluster', most]['seconds'] / most:.2f}",
        "grown": _places(
            shards[runner, most]["launcher"] / shards[runner, least]["launcher"]
            for runner in runners
        ),
        "file_sum": _places(1e3 * row["seconds"] / n for n, row in local.items()),
        "file_open": _places(1e3 * row["opening"] / n for n, row in local.items()),
        "file_memory": _range(kilobytes),
        "files_memory": f"{local[many]['launcher'] / 1024:.1f}",
        "files_seconds": number(local[many]["opening"] + local[many]["seconds"]),
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


def _places(values: Iterable[float]) -> str:
    """The range of numbers of two places, or the number if they are the same."""
    ends = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in (ends[0], ends[-1])))


def _range(values: Iterable[float]) -> str:
    low, high = min(values), max(values)
    return f"{number(low)} to {number(high)}"


def number(value: float) -> str:
    """Two significant digits."""
    if value >= 10:
        digits = len(str(int(value))) - 2
        return f"{round(value, -digits):,.0f}"
    return f"{value:.1f}"


def load() -> dict[str, Any]:
    """What was measured."""
    return {
        **json.loads(MEASURED.read_text("utf-8")),
        "growth": json.loads(GROWTH.read_text("utf-8")),
    }


def main() -> int:
    measured = load()
    for name, text in figures(measured).items():
        print(f"{name:14} {text}")
    faults = missing(measured)
    print(*faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
