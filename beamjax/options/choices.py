"""The choices of a plan as data: shard sizes, and how the members of a shard are computed.

A rule, a probe or the user makes them. They are saved as JSON, so that another process makes the
same plan and computes the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from beamjax.errors import OptionsError
from beamjax.storage import files
from beamjax.storage.schema import add_codec, from_plain, to_plain

MEMBER_LOOPS = ("vmap", "batches", "loop")
"""How a shard is computed: all members at once, some at once, or sequentially."""
RECOMPUTE = ("elementwise", "nothing", "everything")
"""Which placed values later passes rematerialize."""
FORMAT = 1
"""Version of the format of a file of choices."""
MULTIPLE = 8
"""Shard sizes and batches are multiples of this, so that the bits of a member do not depend on its
row in the batch."""


@dataclass(frozen=True)
class Vectorization:
    """How a pass computes the members of a shard.

    Attributes:
      kind: one of `MEMBER_LOOPS`.
      batch: number of members that are computed at once, for "batches"; otherwise 0.
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
      size: number of members in the shard.
      vectorization: how they were computed.
      seconds: time of the shard, including its merge.
    """

    step: str
    size: int
    vectorization: Vectorization
    seconds: float

    @property
    def member_seconds(self) -> float:
        """Seconds per member."""
        return self.seconds / self.size


def check_multiple(size: int) -> None:
    """Raises ValueError unless a size is a positive multiple of `MULTIPLE`."""
    if size < MULTIPLE or size % MULTIPLE:
        raise ValueError(f"expected a positive multiple of {MULTIPLE}")


@dataclass(frozen=True)
class Choices:
    """The choices of a plan.

    Attributes:
      shard_sizes: the number of members in a shard, by placement.
      passes: how each pass computes its shards, by name of the pass.
      origin: what made the choices: "rule", "options", "probe", "cache" or "saved"; "pending" if
        they are not made yet.
      why: the reason for them, in words.
      tried: the measurements of a probe.
      program: fingerprint of the program, without the number of its members.
      rematerialized: for each value that crosses from a pass to later ones, in the program's order,
        whether these rematerialize it; None if that was not decided.
    """

    shard_sizes: Mapping[str, Annotated[int, check_multiple]] = field(default_factory=dict)
    passes: Mapping[str, Vectorization] = field(default_factory=dict)
    origin: str = "rule"
    why: str = ""
    tried: tuple[Trial, ...] = ()
    program: str = ""
    rematerialized: tuple[bool, ...] | None = None

    def __hash__(self) -> int:
        fixed = tuple(self.shard_sizes.items()), tuple(self.passes.items())
        return hash((*fixed, self.rematerialized))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT} | to_plain(self)

    @classmethod
    def from_json(cls, record: Any) -> Choices:
        """Undoes `to_json`.

        Raises:
          ValueError: it is something else; the message says what was found.
        """
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            found = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"found format {found!r}, expected {FORMAT}")
        if missing := [name for name in ("shard_sizes", "passes") if name not in record]:
            raise ValueError(f"found no {' and no '.join(missing)}")
        return from_plain(cls, record, "choices")


# The layout of a file, which earlier versions wrote as well.


def _encode_vectorization(found: Vectorization) -> dict[str, Any]:
    return {"member_loop": found.kind, "batch": found.batch}


def _decode_vectorization(record: Any) -> Vectorization:
    kind, batch = record["member_loop"], record["batch"]
    if kind not in MEMBER_LOOPS:
        raise ValueError(f"expected a member_loop of {', '.join(MEMBER_LOOPS)}")
    if type(batch) is not int or (kind != "batches" and batch):
        raise ValueError(f"expected a whole number as batch, 0 for {kind!r}")
    if kind == "batches":
        check_multiple(batch)
    return Vectorization(kind, batch)


def _encode_trial(trial: Trial) -> dict[str, Any]:
    how = _encode_vectorization(trial.vectorization)
    return {"pass": trial.step, "shard_size": trial.size, **how, "seconds": trial.seconds}


def _decode_trial(record: Any) -> Trial:
    step = from_plain(str, record["pass"], "pass")
    size = from_plain(int, record["shard_size"], "shard_size")
    check_multiple(size)
    seconds = from_plain(float, record["seconds"], "seconds")
    if seconds < 0:
        raise ValueError("expected seconds from 0")
    return Trial(step, size, _decode_vectorization(record), float(seconds))


add_codec(Vectorization, _encode_vectorization, _decode_vectorization)
add_codec(Trial, _encode_trial, _decode_trial)


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
    data = json.dumps(record, indent=1).encode()
    files.write(os.path.abspath(path), data, make=False)
