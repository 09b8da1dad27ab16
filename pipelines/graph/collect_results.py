"""The results of a pipeline. Workers write them to the store, and the launcher finds them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError, WorkerError
from beamjax.numerics.provenance import UNKNOWN, Provenance, merged
from beamjax.pipelines.values.elements import Environment, EnvironmentCoder, MemberBlock, cut
from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.refs import SUFFIX, content_key
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.stored_values import leaf_spec
from beamjax.pipelines.worker.metrics import WorkerSpans
from beamjax.pipelines.worker.tasks import SourceSpecs, StepFn
from beamjax.plan.dropping import Dropped, decode_file, encode_file
from beamjax.plan.shard import Shards
from beamjax.plan.steps import Plan
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.spans import timed
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, encode_arrays

FILE_BYTES = 4 << 20
"""Bytes of members that a bundle collects before it writes them to files."""


class WriteServed(StepFn):
    """Writes the references to server values to a file that the launcher reads."""

    yields = Any

    def __init__(self, store: Store, names: tuple[str, ...], stem: str):
        self.store = store
        self.names = names
        self.stem = stem

    def process(self, environment: Environment) -> None:
        refs = {name: environment.values[name] for name in self.names}
        found = Environment(refs, environment.provenance)
        self.store.write(f"{self.stem}{SUFFIX}", EnvironmentCoder().encode(found))


class ReadMembers(StepFn):
    """Reads the members of a placed input: from ranges of shards to blocks."""

    yields = MemberBlock

    def __init__(self, sources: SourceSpecs, name: str, shards: Shards, store: Store):
        self.store = store
        self.sources = sources
        self.name = name
        self.shards = shards

    def setup(self) -> None:
        """Opens the source."""
        self.reader = self.sources.open()

    def process(self, element: tuple[int, int]) -> Iterator[MemberBlock]:
        for shard in self.shards.between(*element):
            values = self.reader.read([self.name], shard.start, shard.start + shard.count)
            yield from cut(
                MemberBlock(shard.start, shard.count, self.shards.size, values), self.store
            )


class WritePlaced(StepFn):
    """Writes a placed value to files of consecutive members, many blocks in a file."""

    yields = Any

    def __init__(
        self,
        store: Store,
        name: str,
        stem: str,
        results: MaterializedOutputs = NOTHING,
        cached: bool = False,
    ):
        self.store = store
        self.name = name
        self.stem = stem
        # If the value is a materialized result, it is written there instead.
        self.results = results
        # Whether to cache what is written, for later passes in this process. The stem must then be
        # unique among all runs.
        self.cached = cached
        self.spans = WorkerSpans(store.reports)

    def start_bundle(self) -> None:
        self.blocks: list[tuple[int, np.ndarray]] = []
        self.nbytes = 0
        self.provenance = UNKNOWN

    def process(self, block: MemberBlock) -> None:
        self.provenance |= block.provenance
        with timed(self.spans, f"write {self.name}", "transfer"):
            members = block.array(self.name, self.store)
        self.blocks.append((block.start, members))
        self.nbytes += members.nbytes
        if self.nbytes >= FILE_BYTES:
            self.finish_bundle()

    def finish_bundle(self) -> None:
        """Writes the remaining blocks: each run of consecutive members to a file."""
        run: list[tuple[int, np.ndarray]] = []
        for start, members in sorted(self.blocks, key=lambda block: block[0]):
            if run and start != run[-1][0] + len(run[-1][1]):
                self._write(run)
                run = []
            run.append((start, members))
        if run:
            self._write(run)
        if self.provenance:
            _write_provenance(self.store, self.stem, self.provenance)
        self.start_bundle()
        self.spans.report()

    def _write(self, run: list[tuple[int, np.ndarray]]) -> None:
        with timed(self.spans, f"write {self.name}", "transfer"):
            self._write_members(run)

    def _write_members(self, run: list[tuple[int, np.ndarray]]) -> None:
        start, members = run[0][0], np.concatenate([members for _, members in run])
        if self.name in self.results.folders:
            self.results.write(self.name, start, members)
            return
        # A file is named after the members in it. A bundle that is retried may cut the members into
        # other files, which hold the same values.
        name = MembersSource.file_name(self.stem, start, len(members))
        if self.cached:
            self.store.write_members(name, members)
        else:
            self.store.write(name, encode_arrays([members]))


def _write_provenance(store: Store, stem: str, provenance: Provenance) -> None:
    """Writes a provenance to a file named by its content, so most bundles share one file."""
    data = encode_arrays([], {"provenance": provenance.to_json()})
    store.write(f"{stem}-provenance-{content_key([data])}{SUFFIX}", data)


def find_provenance(store: Store, stem: str, written: Iterable[str]) -> Provenance:
    """The provenance of a placed value that `WritePlaced` wrote to these files."""
    prefix = f"{stem}-provenance-"
    paths = [files.join(store.root, name) for name in written if name.startswith(prefix)]
    return merged(map(_read_provenance, paths))


def _read_provenance(path: str) -> Provenance:
    try:
        _, meta = decode_arrays(files.read(path))
        return Provenance.from_json(meta.get("provenance"))
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None


class WriteDropped(StepFn):
    """Writes the list of all members that were dropped."""

    yields = Any

    def __init__(self, store: Store, stem: str):
        self.store = store
        self.stem = stem

    def process(self, element: tuple[Any, Iterable[bytes]]) -> None:
        lines = b"".join(sorted(element[1]))
        self.store.write(f"{self.stem}-dropped{SUFFIX}", encode_file(lines))


def find_dropped(store: Store, stem: str) -> list[Dropped]:
    """The members that a pipeline has dropped."""
    name = f"{stem}-dropped{SUFFIX}"
    if name not in files.names(store.root):
        return []
    path = files.join(store.root, name)
    return decode_file(files.read(path), path)


def read_served(store: Store, stem: str) -> Environment:
    """Reads the references to server values that `WriteServed` wrote."""
    path = files.join(store.root, f"{stem}{SUFFIX}")
    try:
        return EnvironmentCoder().decode(bytes(files.read(path)))
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None
    except OSError as error:
        raise WorkerError(
            f"{path}: cannot read a result ({error}); do the launcher and the workers see the same "
            "files under this path, and were none removed while the pipeline ran?"
        ) from error


def find_placed(
    store: Store, plan: Plan, name: str, stem: str, written: list[str] | None = None
) -> MembersSource:
    """The files of a placed value that `WritePlaced` wrote; `written` are those of the store."""
    value = plan.values[name]
    n = plan.sizes[value.placement or ""]
    names = files.names(store.root) if written is None else written
    source = MembersSource(
        store.root, stem, MembersSource.members_in(names, stem), leaf_spec(value), n
    )
    source.check_complete(f"result {name}")
    return source
