"""The results of a pipeline. Workers write them to the store, and the launcher finds them there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from beamjax.bodies.provenance import Provenance, merged
from beamjax.errors import ArrayFormatError, WorkerError
from beamjax.pipelines.values.elements import Element, ElementCoder, block_of, cut
from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.refs import SUFFIX
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.stored_values import leaf_spec
from beamjax.pipelines.worker.placed_files import PlacedFiles
from beamjax.pipelines.worker.reporting import WorkerSpans
from beamjax.pipelines.worker.tasks import PROVENANCE, SourceSpecs, StepFn
from beamjax.plan.dropping import Dropped, decode_file, encode_file
from beamjax.plan.shard import Shards
from beamjax.plan.steps import Plan
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.spans import timed
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays


class WriteServed(StepFn):
    """Writes the references to server values to a file that the launcher reads."""

    yields = Any

    def __init__(self, store: Store, names: tuple[str, ...], stem: str):
        self.store = store
        self.names = names
        self.stem = stem

    def process(self, values: Element) -> None:
        results = Element({name: values[name] for name in self.names})
        self.store.write(f"{self.stem}{SUFFIX}", ElementCoder().encode(results))


class ReadMembers(StepFn):
    """Reads the members of a placed input: from ranges of shards to blocks."""

    yields = Element

    def __init__(self, sources: SourceSpecs, name: str, shards: Shards, store: Store):
        self.store = store
        self.sources = sources
        self.name = name
        self.shards = shards
        self.spans = WorkerSpans(store.reports)

    def setup(self) -> None:
        """Opens the source."""
        self.reader = self.sources.open()

    def process(self, element: tuple[int, int]) -> Iterator[Element]:
        for shard in self.shards.between(*element):
            with timed(self.spans, f"read {self.name}", "read", shard) as span:
                values = self.reader.read([self.name], shard.start, shard.start + shard.count)
                span.nbytes = values[self.name].nbytes
            yield from cut(block_of(shard.start, shard.count, values), self.store)

    def finish_bundle(self) -> None:
        """Reports the work of this bundle."""
        self.spans.report()


class WritePlaced(StepFn):
    """Writes a placed value to files; see `PlacedFiles`."""

    yields = Any

    def __init__(self, store: Store, name: str, stem: str, results: MaterializedOutputs = NOTHING):
        self.store = store
        self.name = name
        self.stem = stem
        self.results = results
        self.spans = WorkerSpans(store.reports)

    def start_bundle(self) -> None:
        self.files = PlacedFiles(self.store, self.name, self.stem, self.results)

    def process(self, block: Element) -> None:
        with timed(self.spans, f"write {self.name}", "transfer"):
            members = block.array(self.name, self.store)
        self.files.add(block.range[0], members, self.spans)

    def finish_bundle(self) -> None:
        """Writes the remaining blocks."""
        self.files.flush(self.spans)
        self.spans.report()


def find_provenance(store: Store, written: Iterable[str]) -> Provenance:
    """The kinds of machine that have computed the run whose store has these files."""
    paths = [files.join(store.root, name) for name in written if name.startswith(PROVENANCE)]
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


def find_dropped(store: Store, stem: str, written: Collection[str]) -> list[Dropped]:
    """The members that a pipeline has dropped whose store has these files."""
    name = f"{stem}-dropped{SUFFIX}"
    if name not in written:
        return []
    path = files.join(store.root, name)
    return decode_file(files.read(path), path)


def read_served(store: Store, stem: str) -> Element:
    """Reads the references to server values that `WriteServed` wrote."""
    path = files.join(store.root, f"{stem}{SUFFIX}")
    try:
        return ElementCoder().decode(bytes(files.read(path)))
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None
    except OSError as error:
        raise WorkerError(
            f"{path}: cannot read a result ({error}); do the launcher and the workers see the same "
            "files under this path, and were none removed while the pipeline ran?"
        ) from error


def find_placed(
    store: Store, plan: Plan, name: str, stem: str, written: Iterable[str]
) -> MembersSource:
    """The files of a placed value that `WritePlaced` wrote; `written` are those of the store."""
    value = plan.values[name]
    n = plan.sizes[value.placement or ""]
    parts = MembersSource.members_in(written, stem)
    source = MembersSource(store.root, stem, parts, leaf_spec(value), n)
    source.check_complete(f"result {name}")
    return source
