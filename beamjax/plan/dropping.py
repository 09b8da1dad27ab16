"""Members that a pass can't compute: how they are handled, recorded and reported."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError, WorkerError
from beamjax.storage import files
from beamjax.storage.arrays import decode_array, encode_array
from beamjax.storage.schema import from_plain, parse_json, to_plain

_LOG = logging.getLogger("beamjax")
MAX_MESSAGE = 2000
"""Longest error message that is recorded, in characters; the rest is cut off."""


def hole_of(dtype: Any) -> Any:
    """The value in place of a dropped member: NaN, or 0 if the dtype has no NaN."""
    name = np.dtype(dtype).name
    if name.startswith(("float", "bfloat", "complex")):
        nan = np.array(np.nan).astype(dtype)
        if np.isnan(nan.astype(np.complex128)):  # Some narrow floats have no NaN.
            return nan[()]
    return np.zeros((), dtype)[()]


@dataclass(frozen=True)
class Dropped:
    """A member that was dropped from a pass and from all later ones."""

    placement: str
    member: int
    step: str  # the pass
    reason: str  # "error" or "nonfinite"
    message: str  # the error, or the value that was found


def encode_lines(dropped: Iterable[Dropped]) -> bytes:
    """Encodes members as JSON Lines."""
    return b"".join(json.dumps(to_plain(letter)).encode() + b"\n" for letter in dropped)


def decode_lines(data: bytes, path: str) -> list[Dropped]:
    """The inverse of `encode_lines`."""
    records = [parse_json(line, path) for line in data.splitlines()]
    return [from_plain(Dropped, record, path) for record in records]


def encode_file(lines: bytes) -> bytes:
    """Wraps the bytes of `encode_lines` in a file with checksums."""
    return encode_array(np.frombuffer(lines, np.uint8))


def decode_file(data: bytes | memoryview, path: str) -> list[Dropped]:
    """The members in a file that `encode_file` made."""
    try:
        lines = decode_array(data).tobytes()
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None
    return decode_lines(lines, path)


class DeadLetters:
    """The members that a run has dropped, each once, and the file that lists them."""

    def __init__(self, limit: float = 1.0, path: str | None = None):
        self.limit = limit  # the share of the members of a placement, from 0 to 1
        self.path = path  # path or URL of the file; None writes none
        self._found: dict[tuple[str, int], Dropped] = {}
        self._counts: collections.defaultdict[str, int] = collections.defaultdict(int)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """All dropped members, sorted by placement and index."""
        with self._lock:
            return tuple(self._found[key] for key in sorted(self._found)) if self._found else ()

    def add(self, dropped: Iterable[Dropped], sizes: Mapping[str, int]) -> None:
        """Records members of placements of these sizes; raises if more are dropped than allowed."""
        # Retries and later passes find the same members again.
        if not self._add(dropped):
            return
        self.write()
        for placement, n in sizes.items():
            count = self._counts[placement]
            # Without any member left, a mean has no value.
            if not count or (count <= self.limit * n and count < n):
                continue
            of_placement = [letter for letter in self.dropped if letter.placement == placement]
            raise WorkerError(
                f"{_summary(of_placement).rstrip('.')}. That is {count} of {n} members, and "
                f"drop_limit={self.limit:g} allows {min(int(self.limit * n), n - 1)}: find out why "
                "they fail, or raise the option drop_limit"
            )

    def _add(self, dropped: Iterable[Dropped]) -> bool:
        """Records members; returns whether any of them is new."""
        with self._lock:
            before = len(self._found)
            for letter in dropped:
                if self._found.setdefault((letter.placement, letter.member), letter) is letter:
                    self._counts[letter.placement] += 1
            return len(self._found) > before

    def begin(self, *, anew: bool) -> None:
        """Removes the file of an earlier run if `anew`; otherwise reads it, to resume that run."""
        if self.path is None:
            return
        folder, name = os.path.split(self.path)
        with self._usable():
            files.make_folder(folder or ".")
            if name not in files.names(folder or "."):
                return
            if anew:
                files.remove_files(folder, [name])
                return
            lines = bytes(files.read(self.path))
        self._add(decode_lines(lines, self.path))

    def write(self) -> None:
        """Writes all recorded members to the file."""
        if self.path is None:
            return
        with self._usable():
            files.write(self.path, encode_lines(self.dropped))

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Converts errors of the file system to a SourceError that names the file."""
        try:
            yield
        except OSError as error:
            raise SourceError(
                f"{self.path}: cannot be the file of the option dead_letters ({error}); expected a "
                "path or URL that this process can write"
            ) from error

    def warn(self, undropped: Iterable[tuple[str, str]] = ()) -> None:
        """Logs how many members were dropped, and what (see `PlacedProgram`) still counts them."""
        if not self._found:
            return
        where = f"; {self.path} lists them" if self.path else ""
        _LOG.warning("%s%s", _summary(self.dropped), where)
        for placement, text in dict.fromkeys(undropped):
            if count := self._counts[placement]:
                _LOG.warning(
                    "%s by the number of all members of %r, including the %d dropped",
                    text, placement, count,
                )  # fmt: skip


def _summary(dropped: Sequence[Dropped]) -> str:
    first, count = dropped[0], len(dropped)
    members = "1 member was" if count == 1 else f"{count} members were"
    return (
        f"{members} dropped, the first is member {first.member} of {first.placement!r} in step "
        f"{first.step!r}: {_last_line(first.message):.300}"
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
