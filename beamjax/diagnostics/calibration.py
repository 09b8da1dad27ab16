"""The rates of this machine: measured once, in about a second, and saved in a file.

Predicted times depend on them, and so does the option `small_work`. The bits of results do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from beamjax.errors import ArrayFormatError
from beamjax.interpreters.tuning import plan_cache
from beamjax.plan.cost import USUAL, Rates
from beamjax.storage.schema import from_plain, to_plain

FORMAT = 4
"""Version of the format of the file."""
MIN_SECONDS = 1e-9
"""Lower bound of a measured time, in seconds."""
UNMEASURED = replace(USUAL, call=1e-7, extra=2e10)
"""Rates for predictions on a machine that was not measured. The planner always uses `USUAL`, so
that its choices, and the bits of results, are the same on all machines."""


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


# --- the file


def _name() -> str:
    return f"machine-{plan_cache.digest(FORMAT, plan_cache.machine())}"


def calibration() -> Calibration:
    """Returns the saved rates of this machine, or the defaults. It measures nothing."""
    name = _name()
    record = plan_cache.load(name)
    if record is not None:
        try:
            found = from_plain(Calibration, record, name)
            numbers = (*vars(found.rates).values(), found.read, found.merge)
            if min(numbers) <= 0:
                raise ArrayFormatError(f"found the rates {numbers}, expected numbers above 0")
            return found
        except ArrayFormatError as error:
            plan_cache.ignore(name, error)
    return Calibration()


def remember(found: Calibration) -> None:
    """Saves rates in the file, for later predictions."""
    plan_cache.store(_name(), to_plain(found) | {"machine": plan_cache.machine()})
