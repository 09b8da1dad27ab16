"""Writes sources of unknown length to files of the store once, so that passes can read them."""

from __future__ import annotations

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
from beamjax.pipelines.launch import new_pipeline, run_steps
from beamjax.pipelines.run import temporary_store
from beamjax.pipelines.runners.connect import Connection, connect
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.placed_files import FILE_BYTES
from beamjax.pipelines.worker.tasks import SourceSpecs, StepFn
from beamjax.pipelines.worker_inputs import stream_specs
from beamjax.sources.array_source import ArraySource
from beamjax.sources.arrays.npy_source import ArrayFile, NpySource
from beamjax.sources.arrays.placed import encode_part
from beamjax.sources.source_base import Count, Source, StreamSource, open_spec
from beamjax.sources.streams.chunk_source import ChunkSource
from beamjax.sources.streams.chunks import Streams, blocks_of, check_count
from beamjax.sources.streams.spool import spool
from beamjax.storage import files, schema

SUFFIX = ".members"

Part = tuple[str, Count]
"""The name of some files, one for each leaf, and the number of members in each."""
Parts = tuple[Part, ...]


@contextlib.contextmanager
def spooled(
    sources: Sequence[StreamSource], runner: Any, options: Options
) -> Iterator[list[Source]]:
    """The members of sources in files that all workers see, while a run lasts."""
    connection = connect(runner, options)
    # A worker reads each piece once; this process does, if only it can read the source.
    here = [isinstance(source, ChunkSource) and not connection.shared for source in sources]
    with temporary_store(connection.options) as store, _folder_here(store) as folder:
        workers = [source for source, own in zip(sources, here, strict=True) if not own]
        _write_pieces(store, workers, connection)
        numbers = itertools.count()
        written = [
            spool(source, os.path.join(folder, f"source-{number}"))
            if own
            else _found(store, source, next(numbers))
            for number, (source, own) in enumerate(zip(sources, here, strict=True))
        ]
        try:
            yield list(written)
        finally:
            for source in written:
                if isinstance(source, NpySource):
                    source.unmap()


@contextlib.contextmanager
def _folder_here(store: Store) -> Iterator[str]:
    """A local folder: that of the store, or a temporary one if the store is at a URL."""
    if not files.is_url(store.root):
        yield store.root
        return
    with tempfile.TemporaryDirectory(prefix="beamjax-") as folder:
        yield folder


def _write_pieces(store: Store, sources: Sequence[StreamSource], connection: Connection) -> None:
    """Runs a pipeline that writes all pieces of sources to the store."""
    pieces = [(i, piece) for i, source in enumerate(sources) for piece in range(source.pieces)]
    if not pieces:
        return
    streams = Streams(tuple(sources), {}, bool(_compat.config.jax_enable_x64))
    with new_pipeline(connection) as pipeline, stream_specs(streams, connection.shared) as specs:
        spread = pipeline | "Pieces" >> beam.Create(pieces) | "Spread" >> beam.Reshuffle()
        spread | "Read members" >> beam.ParDo(WritePieces(store, specs))
        run_steps(pipeline, connection, store, ["Read members"])


class WritePieces(StepFn):
    """Writes pieces of sources, given as (number of the source, number of the piece), to files."""

    yields = typehints.Any

    def __init__(self, store: Store, specs: SourceSpecs):
        self.store = store
        self.specs = specs

    def process(self, element: tuple[int, int]) -> None:
        number, piece = element
        source = open_spec(self.specs.specs[number])
        assert isinstance(source, StreamSource)
        # If Beam retries a piece, all its files get new names, so a list never names files of an
        # earlier attempt.
        stem = f"stream-{number}-{piece}-{uuid.uuid4().hex}"
        parts: list[Part] = []
        size = max(FILE_BYTES // max(sum(leaf.nbytes for leaf in source.leaves), 1), 1)
        leaves = range(len(source.leaves))
        for count, arrays in blocks_of(source, size, leaves, self.specs.x64, [piece]):
            name = f"{stem}-{len(parts)}"
            for leaf, array in enumerate(arrays):
                self.store.write(_file_name(name, leaf), encode_part(array))
            parts.append((name, count))
        # Last: a piece that has a list has all of its files.
        self.store.write(_list_name(number, piece), json.dumps(parts).encode())


def _file_name(part: str, leaf: int) -> str:
    return f"{part}-{leaf}{SUFFIX}"


def _list_name(number: int, piece: int) -> str:
    return f"stream-{number}-{piece}-parts{SUFFIX}"


def _found(store: Store, source: StreamSource, number: int) -> NpySource | ArraySource:
    """Opens the files that `WritePieces` wrote for a source."""
    parts: list[Part] = []
    for piece in range(source.pieces):
        path = files.join(store.root, _list_name(number, piece))
        try:
            parts += schema.from_plain(Parts, json.loads(bytes(files.read(path))), path)
        except OSError as error:
            raise SourceError(
                f"{path}: cannot read ({error}); do the launcher and the workers see the same "
                "files under this path?"
            ) from error
        except (RecursionError, ValueError) as error:
            if isinstance(error, ArrayFormatError):
                raise
            raise ArrayFormatError(f"{path}: found no list of files ({error})") from error
    check_count(source, sum(count for _, count in parts))
    if not parts:
        none = [np.empty((0, *leaf.shape), leaf.dtype) for leaf in source.leaves]
        return ArraySource(none, source.leaves, source.treedef)
    series = [
        tuple(ArrayFile(files.join(store.root, _file_name(part, leaf)), n) for part, n in parts)
        for leaf in range(len(source.leaves))
    ]
    return NpySource(tuple(series), source.leaves, source.treedef)
