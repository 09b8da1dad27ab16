"""The rates of this machine: measured once, in about a second, and saved in a file.

Predicted times depend on them, and so does the option `small_work`. The bits of results do not.
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
"""Lower bound of a measured time, in seconds."""
UNMEASURED = replace(USUAL, call=1e-7, extra=2e10)
"""Rates for predictions on a machine that was not measured. The planner uses `USUAL` for its
choices, so that these, and the bits of results, are the same on all machines."""


@dataclass(frozen=True)
class Calibration:
    """The rates of a machine.

    Attributes:
      rates: the rates of computing.
      read: bytes per second from memory to a shard.
      merge: bytes of partials per second.
      measured: whether the rates were measured on this machine, or are defaults.
    """

    rates: Rates = UNMEASURED
    read: float = 8e9
    merge: float = 4e9
    measured: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Calibration:
        """Makes the rates from the result of `to_json`.

        Raises:
          ValueError: the record is something else.
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
    """Returns the saved rates of this machine, or the defaults. It measures nothing."""
    name = _name()
    record = plan_cache.load(name)
    if record is not None:
        try:
            return Calibration.from_json(record)
        except ValueError as error:
            plan_cache.ignore(name, error)
    return _known.get(name, Calibration())


def remember(found: Calibration) -> None:
    """Saves rates for this process and later ones."""
    _known[_name()] = found
    plan_cache.store(_name(), {**found.to_json(), "machine": plan_cache.machine()})
