"""How fast this machine is: measured in less than a second, kept in a file, mended after runs.

Nothing that changes bits depends on it: it is for what people are told, and for where small work
goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from beamjax.interpreters.tuning import plan_cache
from beamjax.plan.cost import ELSEWHERE, RUNNERS, USUAL, Fixed, Rates

FORMAT = 3
KINDS = ("read", "compute", "merge", "compile")
"""What is mended by what runs measured, besides what runners take for themselves."""
MEMORY = 0.6
"""How much of an old factor stays when there is a new one."""
MAX_FACTOR = 100.0
MIN_SECONDS = 1e-9
"""Less is no time."""
UNMEASURED = replace(USUAL, call=1e-7, extra=2e10)
"""Rates of a machine that nobody measured, for what is told; `USUAL` is for what is chosen."""


@dataclass(frozen=True)
class Calibration:
    """How fast this machine is.

    Attributes:
      rates: of computing.
      read: bytes a second from memory to a shard.
      merge: bytes of partials a second.
      factors: by which what runs took differs from what these say, by one of `KINDS` or the name of
        a runner.
      measured: whether it was, and is not only usual.
    """

    rates: Rates = UNMEASURED
    read: float = 8e9
    merge: float = 4e9
    factors: Mapping[str, float] = field(default_factory=dict)
    measured: bool = False

    def factor(self, kind: str) -> float:
        """By what to multiply seconds of this kind."""
        return self.factors.get(kind, 1.0)

    def fixed(self, runner: str) -> Fixed:
        """What a runner takes for itself."""
        name = "DirectRunner" if runner == "FnApiRunner" else runner
        found = RUNNERS.get(name, ELSEWHERE)
        times = self.factor(runner)
        return Fixed(times * found.pipeline, times * found.step, times * found.shard)

    def mended(self, kind: str, predicted: float, measured: float) -> Calibration:
        """The same after a run that took `measured` seconds of a kind, and not `predicted`."""
        if min(predicted, measured) < MIN_SECONDS:
            return self
        before = math.log(self.factor(kind))
        new = before + (1 - MEMORY) * math.log(measured / predicted)
        bound = math.log(MAX_FACTOR)
        factor = math.exp(min(max(new, -bound), bound))
        return replace(self, factors={**self.factors, kind: factor})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Calibration:
        """Undoes `to_json`.

        Raises:
          ValueError: it is something else.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"found format {record.get('format')!r}, expected {FORMAT}")
        rates, factors = record.get("rates"), record.get("factors")
        if not isinstance(rates, dict) or not isinstance(factors, dict):
            raise ValueError("found no rates and factors")
        numbers = {f.name: _number(rates.get(f.name)) for f in fields(Rates)}
        return cls(
            Rates(**numbers),
            _number(record.get("read")),
            _number(record.get("merge")),
            {str(kind): _number(factor) for kind, factor in factors.items()},
            record.get("measured") is True,
        )


def _number(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f"found {found!r:.100}, expected a number above 0")
    return float(found)


# --- the file

_known: dict[str, Calibration] = {}


def _name() -> str:
    return f"machine-{plan_cache.digest(FORMAT, plan_cache.machine())}"


def calibration() -> Calibration:
    """That of this machine, as far as it is known; nothing is measured."""
    name = _name()
    record = plan_cache.load(name)
    if record is not None:
        try:
            return Calibration.from_json(record)
        except ValueError as error:
            plan_cache.ignore(name, error)
    return _known.get(name, Calibration())


def remember(found: Calibration) -> None:
    """Keeps a calibration, in this process and for others."""
    _known[_name()] = found
    plan_cache.store(_name(), {**found.to_json(), "machine": plan_cache.machine()})
