"""The bar: what beamjax shall reach, line by line, and what it reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite.ways import BATCH, DIRECT, JIT, LOCAL, LOOP, PEERS, PLAIN, SESSION

Line = dict[str, Any]

REASONS = Path(__file__).with_name("reasons.txt")
FACTOR, MORE_SECONDS = 1.10, 1.0
LOCAL_FACTOR = 1.05
LONG = 10.0
"""Seconds of the shard loop past which beamjax shall be ahead of every peer."""
BATCH_FACTOR = 2.0
EXACT_FACTOR = 1.3
GRADIENT_FACTOR, GRADIENT_SECONDS = 1.3, 0.15


def lines(cases: Mapping[str, Any]) -> list[Line]:
    """Each with its key, what is asked, what was found, and whether that is enough.

    Args:
      cases: letter to what `measure` gave.
    """
    found = []
    for case, measured in cases.items():
        seconds = {row["way"]: row["seconds"] for row in measured["rows"] if row.get("seconds")}
        found += list(_of_case(case, seconds))
    return found


def _of_case(case: str, seconds: Mapping[str, float]) -> Iterator[Line]:
    def line(key: str, ask: str, way: str, limit: float, what: str) -> Line:
        met = seconds[way] <= limit
        numbers = f"{seconds[way]:.3f} s, {what} {limit:.3f} s"
        return {"key": f"{case} {key}", "case": case, "ask": ask, "found": numbers, "met": met}

    def has(*ways: str) -> bool:
        return all(way in seconds for way in ways)

    if case in "ABCDEF" and has(LOOP, DIRECT):
        ask = f"DirectRunner at most {FACTOR:.2f} x the shard loop + {MORE_SECONDS:.0f} s"
        limit = FACTOR * seconds[LOOP] + MORE_SECONDS
        yield line("direct", ask, DIRECT, limit, "limit")
    if case in "ABCDEF" and has(LOOP, LOCAL):
        ask = f"local at most {LOCAL_FACTOR:.2f} x the shard loop"
        yield line("local", ask, LOCAL, LOCAL_FACTOR * seconds[LOOP], "limit")
    if case in "AB" and has(JIT, LOCAL):
        yield line("jit", "local ahead of jit of the whole", LOCAL, seconds[JIT], "jit")
    if case in "AB" and has(JIT, DIRECT):
        yield line("jit-direct", "DirectRunner ahead of jit", DIRECT, seconds[JIT], "jit")
    for key, runner, way in (("exact", "local", LOCAL), ("exact-direct", "DirectRunner", DIRECT)):
        if has(way, PLAIN[way]):
            ask = f"{runner}: exact sums at most {EXACT_FACTOR} x plain adds"
            yield line(key, ask, way, EXACT_FACTOR * seconds[PLAIN[way]], "limit")
    if case == "M" and has(JIT, LOCAL, DIRECT):
        limit = GRADIENT_FACTOR * seconds[JIT]
        yield line("jit", f"local at most {GRADIENT_FACTOR} x jit", LOCAL, limit, "limit")
        ask = f"DirectRunner at most {GRADIENT_FACTOR} x jit + {GRADIENT_SECONDS} s"
        yield line("jit-direct", ask, DIRECT, limit + GRADIENT_SECONDS, "limit")
    if case == "B" and has(BATCH, DIRECT):
        ask = f"DirectRunner at least {BATCH_FACTOR:.0f} x as fast as BatchElements"
        yield line("batch", ask, DIRECT, seconds[BATCH] / BATCH_FACTOR, "half of its")
    if has(LOOP, DIRECT) and seconds[LOOP] > LONG:
        for peer in PEERS:
            if peer in seconds:
                ask = f"DirectRunner ahead of {peer}, past {LONG:.0f} s"
                yield line(peer, ask, DIRECT, seconds[peer], f"{peer}")


def exact_over_plain(cases: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    """Case to way of beamjax to its seconds and those of the same with plain adds."""
    found = {}
    for case, measured in cases.items():
        seconds = {row["way"]: row["seconds"] for row in measured["rows"] if row.get("seconds")}
        pairs = PLAIN.items()
        both = {w: (seconds[w], seconds[p]) for w, p in pairs if w in seconds and p in seconds}
        if both:
            found[case] = both
    return found


def standings(cases: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Case, peer, and how many times its seconds are those of a session on DirectRunner."""
    for case, measured in cases.items():
        seconds = {row["way"]: row["seconds"] for row in measured["rows"] if row.get("seconds")}
        if SESSION in seconds:
            for way in (JIT, *PEERS):
                if way in seconds:
                    yield case, way, seconds[way] / seconds[SESSION]


def behind(cases: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The key, such as `A vs dask-2`, and the ratio of each peer that is faster than a session."""
    return [(f"{case} vs {way}", ratio) for case, way, ratio in standings(cases) if ratio < 1]


def reasons(path: Path = REASONS) -> dict[str, str]:
    """Why a line is missed, by its key: `A direct: text`, a line each, written by hand."""
    found = {}
    for number, text in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if not text.strip() or text.startswith("#"):
            continue
        key, colon, reason = text.partition(":")
        if not colon:
            raise ValueError(f"{path}, line {number}: found {text!r}, expected 'A direct: reason'")
        found[key.strip()] = reason.strip()
    return found


def untold(found: list[Line], cases: Mapping[str, Any], why: Mapping[str, str]) -> list[str]:
    """Keys of targets that are missed, and of peers that are faster, which have no reason yet."""
    keys = [line["key"] for line in found if not line["met"]]
    return [key for key in (*keys, *(key for key, _ in behind(cases))) if key not in why]
