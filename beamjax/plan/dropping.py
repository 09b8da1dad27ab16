"""Members that a pass can't be computed for: what becomes of them, and who is told."""

from __future__ import annotations

import collections
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError, WorkerError
from beamjax.storage import records
from beamjax.storage.arrays import decode_array, encode_array

_LOG = logging.getLogger("beamjax")
MAX_MESSAGE = 2000
"""Characters that are kept of an error."""


@dataclass(frozen=True)
class Guard:
    """What a pass does with members that it can't be computed for.

    The body of a guarded pass takes `(start, members, kept, *broadcasts, *operands)`: the index of
    the first member of the shard, the index of each member, of whom some may stand for others, and
    which of them count. It gives as its last array the flags of members of which all floats are
    finite, if `on_nonfinite` is not "keep".

    Attributes:
      on_error: "raise" or "drop", for members that can't be read or computed.
      on_nonfinite: "keep", "raise" or "drop", for members that give NaN or infinity.
      reads: whether the last operand of the pass says who was kept by those before it.
      tells: whether the last result of the pass says who is kept by it.
    """

    on_error: str
    on_nonfinite: str
    reads: bool = False
    tells: bool = False

    @property
    def drops(self) -> bool:
        """Whether members may be left out."""
        return "drop" in (self.on_error, self.on_nonfinite)


@dataclass(frozen=True)
class Dropped:
    """A member that was left out of a pass, and of all that follow it.

    Attributes:
      placement: that it is a member of.
      member: its index.
      step: name of the pass.
      reason: "error" or "nonfinite".
      message: what was raised, or found.
    """

    placement: str
    member: int
    step: str
    reason: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any, path: str) -> Dropped:
        """Undoes `to_json`.

        Raises:
          ArrayFormatError: the record at `path` is something else.
        """
        if not isinstance(record, dict):
            raise ArrayFormatError(f"{path}: found {record!r:.200}, expected a dropped member")
        return cls(**records.checked(record, _FIELDS, path))


_FIELDS: dict[str, Any] = {
    "placement": str,
    "member": int,
    "step": str,
    "reason": str,
    "message": str,
}


def encode_lines(dropped: Iterable[Dropped]) -> bytes:
    """A line of JSON for each member."""
    return b"".join(json.dumps(each.to_json()).encode() + b"\n" for each in dropped)


def decode_lines(data: bytes, path: str) -> list[Dropped]:
    """Undoes `encode_lines`.

    Raises:
      ArrayFormatError: the bytes at `path` are something else.
    """
    try:
        found = [json.loads(line) for line in data.splitlines()]
    except (ValueError, RecursionError) as error:
        raise ArrayFormatError(f"{path}: {error}; expected lines of JSON") from None
    return [Dropped.from_json(record, path) for record in found]


def encode_file(lines: bytes) -> bytes:
    """Such lines as a file with checksums."""
    return encode_array(np.frombuffer(lines, np.uint8))


def decode_file(data: bytes | memoryview, path: str) -> list[Dropped]:
    """The members in what `encode_file` wrote.

    Raises:
      ArrayFormatError: the bytes at `path` are something else.
    """
    try:
        lines = decode_array(data).tobytes()
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None
    return decode_lines(lines, path)


class DeadLetters:
    """The members that a run has dropped, each once, with a file that lists them.

    Args:
      limit: the share of the members of a placement that may be dropped.
      path: of the file, a path or URL; None writes none.
    """

    def __init__(self, limit: float = 1.0, path: str | None = None):
        self.limit = limit
        self.path = path
        self._found: dict[tuple[str, int], Dropped] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """All of them, by placement and index."""
        with self._lock:
            return tuple(self._found[key] for key in sorted(self._found))

    def add(self, found: Iterable[Dropped], sizes: Mapping[str, int | None]) -> None:
        """Members were dropped.

        Args:
          found: they, in any order, and perhaps again.
          sizes: the number of members of each placement, as far as it is known.

        Raises:
          WorkerError: there are too many.
        """
        if not self._add(found):
            return
        self.write()
        for placement, n in sizes.items():
            count = self._counts[placement]
            if n is None or not count or (count <= self.limit * n and count < n):
                continue
            dropped = [each for each in self.dropped if each.placement == placement]
            raise WorkerError(
                f"{_summary(dropped).rstrip('.')}. That is {count} of {n} members, and drop_limit="
                f"{self.limit:g} allows {min(int(self.limit * n), n - 1)}: find out why they fail, "
                "or raise the option drop_limit"
            )

    def _add(self, found: Iterable[Dropped]) -> bool:
        """Whether there are new ones among them."""
        with self._lock:
            before = len(self._found)
            for each in found:
                if self._found.setdefault((each.placement, each.member), each) is each:
                    self._counts[each.placement] += 1
            return len(self._found) > before

    def begin(self, *, anew: bool) -> None:
        """Removes the file, or reads what a run that goes on from a checkpoint wrote into it.

        Raises:
          ArrayFormatError: the file is something else.
        """
        if self.path is None:
            return
        from beamjax.storage import files

        folder, name = os.path.split(self.path)
        if name not in files.names(folder or "."):
            return
        if anew:
            files.remove_files(folder, [name])
            return
        self._add(decode_lines(bytes(files.read(self.path)), self.path))

    def write(self) -> None:
        """Writes the file, with all that are known."""
        if self.path is None:
            return
        from beamjax.storage import files

        files.write(self.path, encode_lines(self.dropped))

    def tell(self) -> None:
        """Says in the log how many there are."""
        dropped = self.dropped
        if dropped:
            where = f"; {self.path} lists them" if self.path else ""
            _LOG.warning("%s%s", _summary(dropped), where)


def _summary(dropped: Sequence[Dropped]) -> str:
    first, count = dropped[0], len(dropped)
    members = "1 member was" if count == 1 else f"{count} members were"
    return (
        f"{members} dropped, the first is member {first.member} of {first.placement!r} in step "
        f"{first.step!r}: {_last_line(first.message):.300}"
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
