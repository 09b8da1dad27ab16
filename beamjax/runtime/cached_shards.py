"""A cache of the results of shards. A key is a hash of everything that the results depend on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import export

from beamjax._text import human_bytes
from beamjax.bodies.provenance import provenance_here
from beamjax.bodies.xla_threads import lapack_limit
from beamjax.options import Options
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Body, Map, Plan
from beamjax.runtime.fingerprints import array_fingerprint, body_fingerprint, digest
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.shard_executor import Computed, partials_of
from beamjax.runtime.values import Reader
from beamjax.sources.array_source import ArraySource
from beamjax.sources.source_base import members_bytes
from beamjax.spans import count
from beamjax.storage.partial_cache import PartialCache
from beamjax.storage.shared_cache import SharedCache

_FORM = "2"
"""Version of addresses and files. Increase it when either changes: old entries are then ignored."""
_log = logging.getLogger(__name__)


def uncached_reason(plan: Plan, step: Map) -> str:
    """The reason why the shards of a pass are not cached; "" if they are."""
    if step.results:
        return "it makes placed values, of which later steps need all members"
    if not step.partial_bytes:
        return "it reduces nothing"
    python = [plan.bodies[key].python for key in step.all_bodies]
    reasons = [body.reason for body in python if body is not None]
    return f"it runs as Python: {reasons[0]}" if reasons else ""


class CachedShards:
    """The shards of one pass in a cache."""

    # The address of a shard is a hash of the bodies, the server values that they read, the
    # members, and the type of machine and the versions that affect the bits of results. The index
    # of the first member is included only if a body reads it, so a shard is also found after its
    # members moved.

    def __init__(
        self,
        cache: PartialCache,
        plan: Plan,
        step: Map,
        broadcasts: Mapping[str, np.ndarray | jax.Array],
        xla_threads: int,
    ):
        self._cache = cache
        self._step = step
        # Shards that are about to be read, by number: the address at which `computed` records the
        # content of their files, so that the next run need not read them.
        self._notes: dict[int, str] = {}
        bodies = [plan.bodies[key] for key in step.executables]
        self._reads_start = any(_reads_start(body, step.guard is not None) for body in bodies)
        guard = step.guard
        self._head = digest([
            _FORM,
            plan.shard_sizes[step.placement],
            plan.x64,
            sorted(provenance_here(xla_threads).kinds),
            list(map(_fingerprint_of, bodies)),
            self._types,
            None if guard is None else (guard.on_error, guard.on_nonfinite, guard.reads),
            [array_fingerprint(np.asarray(broadcasts[name])) for name in step.broadcasts],
        ])  # fmt: skip

    def computed(
        self, shard: Shard, operands: Sequence[np.ndarray], compute: Callable[[], Computed]
    ) -> Computed:
        """The results of a shard, from the cache; otherwise they are computed and stored."""
        contents = list(map(array_fingerprint, operands))
        if (note := self._notes.pop(shard.index, None)) is not None:
            self._cache.store(note, [], {"contents": contents})
        address = self._address(shard, contents)
        known = self._found(address)
        if known is not None:
            return known
        results = compute()
        # Results with dropped members are not stored, so that each run reports these members.
        if not results.dropped and all(part is not None for part in results.partials):
            arrays = jax.tree.leaves(results.partials)
            self._cache.store(address, arrays, {"left_out": results.left_out})
        return results

    def unread(self, shard: Shard, reader: Reader) -> Computed | None:
        """The results of a shard whose files an earlier run has read; no members are read."""
        # None if there are no such results; `computed` then records the content of the files.
        marks = reader.stamps(self._step.operands, shard.start, shard.start + shard.count)
        if marks is None:
            return None
        note = _note_of(marks)
        _, meta = self._cache.find(note) or ([], {})
        contents = meta.get("contents")
        if isinstance(contents, list) and len(contents) == len(marks):
            known = self._found(self._address(shard, list(map(str, contents))))
            if known is not None:
                return known
        self._notes[shard.index] = note
        return None

    def is_known(self, shard: Shard, reader: Reader) -> bool:
        """Whether the cache has a shard. Only members that are in memory are read."""
        operands, stop = self._step.operands, shard.start + shard.count
        marks = reader.stamps(operands, shard.start, stop)
        if marks is None:
            arrays = reader.read(operands, shard.start, stop)
            contents = [array_fingerprint(arrays[name]) for name in operands]
        else:
            note = _note_of(marks)
            _, meta = self._cache.find(note) or ([], {})
            contents = list(map(str, meta.get("contents", ())))
        return self._cache.find(self._address(shard, contents)) is not None

    def _address(self, shard: Shard, contents: Sequence[str]) -> str:
        start = shard.start if self._reads_start else None
        return digest([self._head, start, shard.count, list(contents)]).removeprefix("#")

    def _found(self, address: str) -> Computed | None:
        entry = self._cache.find(address)
        if entry is None:
            return None
        arrays, meta = entry
        types = [(array.shape, array.dtype.name) for array in arrays]
        if types != self._types or type(meta.get("left_out")) is not int:
            _log.warning("cache: the arrays in %s are not of the types of this pass", address)
            return None
        count("shards_cached")
        return Computed([], partials_of(self._step, arrays), meta["left_out"])

    @property
    def _types(self) -> list[tuple[tuple[int, ...], str]]:
        leaves = [leaf for combine in self._step.combines for leaf in combine.leaves]
        buffers = [((buffer.size,), buffer.dtype) for buffer in self._step.buffers]
        return [*buffers, *((leaf.shape, leaf.dtype) for leaf in leaves)]


def _note_of(marks: Sequence[str]) -> str:
    """The address of the record that says what files with these marks contain."""
    return digest([_FORM, "content of files", list(marks)]).removeprefix("#")


MOST_COUNTED = 10_000
"""Largest number of shards of a pass that `count_cached` looks up; each takes about 0.1 ms."""

MOST_COUNTED_BYTES = 1 << 28
"""Most bytes of arrays in memory that `count_cached` hashes."""


def count_cached(inputs: Inputs, step: Map, options: Options) -> int | str:
    """The number of shards that a run here would find in the cache, or why that is not known."""
    # `explain` neither computes nor reads files, so the answer may be a text that says why not.
    plan, reader = inputs.plan, inputs.reader()
    n = plan.sizes[step.placement]
    served = {spec.server: i for i, spec in enumerate(plan.inputs) if spec.server is not None}
    if n is None:
        return "the number of members is not known before a run"
    shards = plan.shards(step.placement)
    if len(shards) > MOST_COUNTED:
        return f"explain looks up at most {MOST_COUNTED} shards"
    if not (served.keys() >= set(step.broadcasts) and reader.where.keys() >= set(step.operands)):
        return "it reads results of other steps"
    if any(isinstance(inputs.values[served[name]], tuple) for name in step.broadcasts):
        return "a server value has to be read"
    sources = [reader.sources[reader.where[name][0]] for name in step.operands]
    if all(isinstance(source, ArraySource) for source in sources):
        if sum(map(members_bytes, sources)) > MOST_COUNTED_BYTES:
            return f"explain reads at most {human_bytes(MOST_COUNTED_BYTES)} of members"
    elif reader.stamps(step.operands, 0, min(n, 1)) is None:
        return "the members have to be read"
    broadcasts = {name: inputs.whole(served[name]) for name in step.broadcasts}
    assert options.cache is not None
    with lapack_limit:  # as in a run: the number of threads is part of the addresses
        cached = cached_shards(options.cache, plan, step, broadcasts, options.xla_threads)
    assert cached is not None
    return sum(cached.is_known(shard, reader) for shard in shards)


def cached_shards(
    folder: str,
    plan: Plan,
    step: Map,
    broadcasts: Mapping[str, np.ndarray | jax.Array],
    xla_threads: int,
) -> CachedShards | None:
    """The shards of a pass in the cache of a folder; None for a pass with an `uncached_reason`."""
    if uncached_reason(plan, step):
        return None
    cache = _CACHES.get(folder, lambda: PartialCache(folder))
    return CachedShards(cache, plan, step, broadcasts, xla_threads)


_CACHES: SharedCache[PartialCache] = SharedCache(16, lambda _: 1)
"""By folder: one object for all threads, as it counts the bytes that they write."""


def _reads_start(body: Body, guarded: bool) -> bool:
    """Whether a body reads the index of the first member, or of any member if it has a guard."""
    # Argument 0 is the index of the first member; with a guard, argument 1 has all indices.
    heads = {0, 1} if guarded else {0}
    return any(heads & set(_exported_facts(data)[1]) for data in body.artefacts.values())


def _fingerprint_of(body: Body) -> str:
    facts = [_exported_facts(data)[0] for _, data in sorted(body.artefacts.items())]
    return " ".join([*facts, *body.narrow])


@functools.lru_cache(maxsize=256)
def _exported_facts(data: bytes) -> tuple[str, tuple[int, ...]]:
    """The fingerprint of an artefact, and the positions of the arguments that it reads."""
    exported = export.deserialize(bytearray(data))
    body = Body("", {"": data})
    return body_fingerprint(body), tuple(exported.module_kept_var_idx)
