"""Reads sources of unknown length once, into files of the store, from which passes read them."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam import typehints

from beamjax import _compat
from beamjax.errors import ArrayFormatError, SourceError
from beamjax.options import Options
from beamjax.pipelines.graph.results import FILE_BYTES
from beamjax.pipelines.launch import new_pipeline, run_steps
from beamjax.pipelines.run import opened_streams, temporary_store
from beamjax.pipelines.runners.connect import Connection, connect
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.sources.source_base import (
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    Source,
    StreamSource,
    field,
    natural,
    open_spec,
)
from beamjax.sources.streams.chunk_source import ChunkSource
from beamjax.sources.streams.chunks import blocks_of, check_count
from beamjax.sources.streams.spool import spool
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, encode_arrays

SUFFIX = ".members"

Part = tuple[str, int]
"""The name of a file and the number of members in it."""


def open_on_workers(sources: Sequence[StreamSource], runner: Any, options: Options) -> bool:
    """Whether the workers of a runner can read sources themselves."""
    if not any(isinstance(source, ChunkSource) for source in sources):
        return True
    return connect(runner, options).shared


@contextlib.contextmanager
def spooled(
    sources: Sequence[StreamSource], runner: Any, options: Options
) -> Iterator[list[Source]]:
    """The members of sources in files that all workers see, while a run lasts.

    Each piece is read once, by a worker; or by this process, if only it can.

    Raises:
      SourceError: a source can't be read, or has no member.
    """
    connection = connect(runner, options)
    here = [isinstance(source, ChunkSource) and not connection.shared for source in sources]
    with temporary_store(connection.options) as store, _folder_here(store) as folder:
        workers = [source for source, own in zip(sources, here, strict=True) if not own]
        _write_pieces(store, workers, connection)
        numbers = itertools.count()
        yield [
            spool(source, os.path.join(folder, f"source-{number}"))
            if own
            else _found(store, source, next(numbers))
            for number, (source, own) in enumerate(zip(sources, here, strict=True))
        ]


@contextlib.contextmanager
def _folder_here(store: Store) -> Iterator[str]:
    """A folder of this machine: that of a store, or one whose files are uploaded from here."""
    if not files.is_url(store.root):
        yield store.root
        return
    with tempfile.TemporaryDirectory(prefix="beamjax-") as folder:
        yield folder


def _write_pieces(store: Store, sources: Sequence[StreamSource], connection: Connection) -> None:
    """Has workers write all pieces of sources to the store."""
    pieces = [(i, piece) for i, source in enumerate(sources) for piece in range(source.pieces)]
    if not pieces:
        return
    shared, x64 = connection.shared, bool(_compat.config.jax_enable_x64)
    with new_pipeline(connection) as pipeline, opened_streams(sources, shared) as specs:
        spread = pipeline | "Pieces" >> beam.Create(pieces) | "Spread" >> beam.Reshuffle()
        spread | "Read members" >> beam.ParDo(WritePieces(store, specs, x64))
        run_steps(pipeline, connection, store, ["Read members"])


class WritePieces(StepFn):
    """Pieces of sources, as (number of the source, number of the piece), to files of members.

    The list of files is written last. If Beam retries a piece, all its files get new names, so a
    list never names files of an earlier attempt.

    Args:
      store: where to write.
      specs: of the sources.
      x64: whether JAX computes with 64-bit types.
    """

    yields = typehints.Any

    def __init__(self, store: Store, specs: tuple[dict[str, Any], ...], x64: bool):
        self.store = store
        self.specs = specs
        self.x64 = x64

    def process(self, element: tuple[int, int]) -> None:
        number, piece = element
        source = open_spec(self.specs[number])
        assert isinstance(source, StreamSource)
        stem = f"stream-{number}-{piece}-{uuid.uuid4().hex}"
        parts: list[Part] = []
        size = max(FILE_BYTES // max(sum(leaf.nbytes for leaf in source.leaves), 1), 1)
        leaves = range(len(source.leaves))
        for count, arrays in blocks_of(source, size, leaves, self.x64, [piece]):
            name = f"{stem}-{len(parts)}{SUFFIX}"
            self.store.write(name, encode_arrays(arrays))
            parts.append((name, count))
        self.store.write(_list_name(number, piece), json.dumps(parts).encode())


def _list_name(number: int, piece: int) -> str:
    return f"stream-{number}-{piece}-parts{SUFFIX}"


def _found(store: Store, source: StreamSource, number: int) -> SpooledSource:
    """What `WritePieces` wrote of a source."""
    parts: list[Part] = []
    for piece in range(source.pieces):
        path = files.join(store.root, _list_name(number, piece))
        try:
            parts += _parts(json.loads(bytes(files.read(path))))
        except OSError as error:
            raise SourceError(
                f"{path}: cannot read ({error}); do the launcher and the workers see the same "
                "files under this path?"
            ) from error
        except (RecursionError, TypeError, ValueError) as error:
            raise ArrayFormatError(f"{path}: found no list of files ({error})") from error
    check_count(source, sum(count for _, count in parts))
    return SpooledSource(store.root, parts, source.leaves, source.treedef)


def _parts(listed: Any) -> list[Part]:
    """Parts as JSON gives them back; TypeError or ValueError for anything else."""
    if not all(isinstance(name, str) for name, _ in listed):
        raise TypeError("the names of files are no texts")
    return [(name, natural(count)) for name, count in listed]


class SpooledSource(HoldsLeaves, kind="spooled"):
    """Members in files that each hold consecutive ones, of all leaves.

    Args:
      folder: of the files.
      parts: name and number of members of each file, in order.
      leaves: one member of each.
      treedef: the tree that they form; a tuple by default.
    """

    def __init__(
        self,
        folder: str,
        parts: Sequence[Part],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef | None = None,
    ):
        super().__init__(leaves, treedef)
        self.folder = folder
        self.parts = list(parts)
        self._ends = list(itertools.accumulate(count for _, count in self.parts))
        # Shards are read in order: the next one is often in the same file.
        self._last: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        pieces = [[np.empty((0, *leaf.shape), leaf.dtype) for leaf in self._leaves]]
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[number] - self.parts[number][1]
            end = min(stop, self._ends[number])
            pieces.append([x[start - first : end - first] for x in self._members(number)])
            start, number = end, number + 1
        if len(pieces) == 2:
            return pieces[1]
        return [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]

    def to_spec(self) -> dict[str, Any]:
        leaves = [leaf.to_json() for leaf in self._leaves]
        parts = [list(part) for part in self.parts]
        return {**self.spec_head(), "folder": self.folder, "parts": parts, "leaves": leaves}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> SpooledSource:
        leaves = [LeafSpec.from_json(record) for record in spec["leaves"]]
        return cls(field(spec, "folder", str), _parts(spec["parts"]), leaves)

    def _members(self, number: int) -> list[np.ndarray]:
        last = self._last
        if last is None or last[0] != number:
            last = self._last = number, self._load(*self.parts[number])
        return last[1]

    def _load(self, name: str, count: int) -> list[np.ndarray]:
        path = files.join(self.folder, name)
        try:
            arrays = decode_arrays(files.read(path))[0]
        except OSError as error:
            raise SourceError(f"{path}: cannot read members ({error}).") from error
        except (ArrayFormatError, ValueError) as error:
            raise ArrayFormatError(f"{path}: {error}") from None
        found = [(array.shape, array.dtype) for array in arrays]
        if found != [((count, *leaf.shape), leaf.dtype) for leaf in self._leaves]:
            raise ArrayFormatError(
                f"{path}: found {found}, expected {count} members of {self._leaves}."
            )
        return arrays
