"""How fast this machine is: measured once, in less than a second, and kept in a file.

Predicted times depend on it, and whether small work stays in this process. Bits of results do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from beamjax.interpreters.tuning import plan_cache
from beamjax.plan.cost import USUAL, Rates

FORMAT = 4
MIN_SECONDS = 1e-9
"""Seconds below which a measured time is taken as this."""
UNMEASURED = replace(USUAL, call=1e-7, extra=2e10)
"""Rates for predictions on a machine that was not measured. The planner chooses by `USUAL`, so
that its choices, and with them the bits of results, are the same on all machines."""


@dataclass(frozen=True)
class Calibration:
    """How fast this machine is.

    Attributes:
      rates: of computing.
      read: bytes a second from memory to a shard.
      merge: bytes of partials a second.
      measured: whether the rates were measured; else they are those of a usual machine.
    """

    rates: Rates = UNMEASURED
    read: float = 8e9
    merge: float = 4e9
    measured: bool = False

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
        rates = record.get("rates")
        if not isinstance(rates, dict):
            raise ValueError("found no rates")
        numbers = {f.name: _number(rates.get(f.name)) for f in fields(Rates)}
        return cls(
            Rates(**numbers),
            _number(record.get("read")),
            _number(record.get("merge")),
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
    """The rates of this machine, as far as they are known; measures nothing."""
    name = _name()
    record = plan_cache.load(name)
    if record is not None:
        try:
            return Calibration.from_json(record)
        except ValueError as error:
            plan_cache.ignore(name, error)
    return _known.get(name, Calibration())


def remember(found: Calibration) -> None:
    """Stores a calibration for this process and later ones."""
    _known[_name()] = found
    plan_cache.store(_name(), {**found.to_json(), "machine": plan_cache.machine()})
