"""The choices of a plan as data: shard sizes, and how the members of a shard are computed.

Choices are what a rule, a probe or a user decided. They are written as JSON, so that another
process makes the same plan, and so the same bits.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from beamjax.errors import OptionsError

MEMBER_LOOPS = ("vmap", "batches", "loop")
"""How a shard is computed: all members at once, some at once, or sequentially."""
RECOMPUTE = ("elementwise", "nothing", "everything")
"""Which placed values later passes rematerialize."""
FORMAT = 1
MULTIPLE = 8
"""Batches are multiples of this: then the bits of a member do not depend on its row in the
batch."""


@dataclass(frozen=True)
class Vectorization:
    """How a pass computes the members of a shard.

    Attributes:
      kind: one of `MEMBER_LOOPS`.
      batch: members at once, for "batches"; else 0.
    """

    kind: str = "vmap"
    batch: int = 0

    def __str__(self) -> str:
        return f"batches of {self.batch}" if self.kind == "batches" else self.kind


@dataclass(frozen=True)
class Trial:
    """A measurement of a pass, for a shard size and a vectorization.

    Attributes:
      step: name of the pass.
      size: members in a shard.
      vectorization: how they were computed.
      seconds: of a shard, with its merge.
    """

    step: str
    size: int
    vectorization: Vectorization
    seconds: float

    @property
    def member_seconds(self) -> float:
        """Seconds of a member."""
        return self.seconds / self.size


@dataclass(frozen=True)
class Choices:
    """What a plan is fixed to.

    Attributes:
      sizes: members in a shard, by placement.
      vectorizations: by name of the pass.
      origin: what chose it: "rule", "options", "probe", "cache" or "saved"; or "pending".
      why: in words.
      tried: what was timed for it.
      program: fingerprint of the program, without the number of its members.
      rematerialized: for each value that crosses from a pass to later ones, in the program's order,
        whether these make it again; None where that was not decided.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    vectorizations: Mapping[str, Vectorization] = field(default_factory=dict)
    origin: str = "rule"
    why: str = ""
    tried: tuple[Trial, ...] = ()
    program: str = ""
    rematerialized: tuple[bool, ...] | None = None

    def __hash__(self) -> int:
        fixed = tuple(self.sizes.items()), tuple(self.vectorizations.items()), self.rematerialized
        return hash(fixed)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "program": self.program,
            "origin": self.origin,
            "why": self.why,
            "shard_sizes": dict(self.sizes),
            "rematerialized": None if self.rematerialized is None else list(self.rematerialized),
            "passes": {
                name: {"member_loop": vectorization.kind, "batch": vectorization.batch}
                for name, vectorization in self.vectorizations.items()
            },
            "tried": [
                {
                    "pass": t.step,
                    "shard_size": t.size,
                    "member_loop": t.vectorization.kind,
                    "batch": t.vectorization.batch,
                    "seconds": t.seconds,
                }
                for t in self.tried
            ],
        }

    @classmethod
    def from_json(cls, record: Any) -> Choices:
        """Undoes `to_json`.

        Raises:
          ValueError: it is something else; the message says what was found.
        """
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            found = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"found format {found!r}, expected {FORMAT}")
        sizes, passes = _part(record, "shard_sizes", dict), _part(record, "passes", dict)
        for name, size in sizes.items():
            _check_size(f"shard_sizes[{name!r}]", size)
        tried = []
        for trial in _part(record, "tried", list):
            trial = trial if isinstance(trial, dict) else {}
            size, seconds = _part(trial, "shard_size", int), trial.get("seconds")
            _check_size("tried: shard_size", size)
            if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
                raise ValueError(f"found {seconds!r} as seconds, expected a number from 0")
            step = _part(trial, "pass", str)
            tried.append(Trial(step, size, _looping("tried", trial), float(seconds)))
        return cls(
            dict(sizes),
            {name: _looping(name, found) for name, found in passes.items()},
            _part(record, "origin", str),
            _part(record, "why", str),
            tuple(tried),
            _part(record, "program", str),
            _rematerialized(record.get("rematerialized")),
        )


def _part(record: Mapping[str, Any], name: str, kind: type) -> Any:
    found = record.get(name)
    if not isinstance(found, kind):
        raise ValueError(f"found {found!r:.100} as {name!r}, expected a {kind.__name__}")
    return found


def _rematerialized(found: Any) -> tuple[bool, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(each, bool) for each in found):
        raise ValueError(
            f"found {found!r:.100} as 'rematerialized', expected a list of true and false"
        )
    return tuple(found)


def _check_size(name: str, size: Any) -> None:
    if type(size) is not int or size < MULTIPLE or size % MULTIPLE:
        raise ValueError(f"found {size!r:.100} as {name}, expected a positive multiple of 8")


def _looping(name: str, found: Any) -> Vectorization:
    found = found if isinstance(found, dict) else {}
    kind, batch = found.get("member_loop"), found.get("batch")
    if kind not in MEMBER_LOOPS:
        raise ValueError(
            f"{name}: found member_loop {kind!r:.100}, expected one of {', '.join(MEMBER_LOOPS)}"
        )
    if kind == "batches":
        _check_size(f"{name}: batch", batch)
    elif batch != 0 or type(batch) is not int:
        raise ValueError(f"{name}: found batch {batch!r:.100}, expected 0 without batches")
    return Vectorization(kind, batch)


def read_choices(path: str | os.PathLike[str]) -> Choices:
    """The choices in a file of `Explanation.save_choices`.

    Raises:
      OptionsError: there is no such file, or it holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return Choices.from_json(json.load(file))
    except OSError as error:
        raise OptionsError(f"plan: cannot read {os.fspath(path)} ({error})") from error
    except ValueError as error:
        raise OptionsError(
            f"plan: {os.fspath(path)}: {error}; expected a file that "
            "beamjax.explain(...).save_choices wrote"
        ) from error


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """Writes a file of JSON atomically.

    Raises:
      OSError: it can't be written.
    """
    path = os.path.abspath(path)
    handle, temporary = tempfile.mkstemp(".tmp", os.path.basename(path), os.path.dirname(path))
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
