"""The description of a step for workers, and the executors that each process makes from it once.

Beam pickles DoFns, so they hold plain values only: steps as data, bodies and server values as
references into the store, and sources as specs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import apache_beam as beam
import jax
import numpy as np
from apache_beam.typehints.decorators import IOTypeHints

from beamjax._beam_compat import INSPECT, get_function_args_defaults
from beamjax.bodies.jax_settings import debugging
from beamjax.bodies.load import with_x64
from beamjax.bodies.provenance import Provenance, provenance_here
from beamjax.bodies.xla_threads import compute_device
from beamjax.pipelines.values import store as stores
from beamjax.pipelines.values.elements import Element
from beamjax.pipelines.values.refs import SUFFIX, StoreRef, content_key
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.orphans import unless_orphaned
from beamjax.pipelines.worker.reporting import WorkerSpans, recorded, watchdog_of
from beamjax.plan.steps import Body, Gather, Map, Plan, Server
from beamjax.runtime.shard_executor import LoadedPass, ShardExecutor, put_broadcast
from beamjax.runtime.values import Reader
from beamjax.runtime.worker_environment import Machine
from beamjax.sources.source_base import open_spec, release
from beamjax.spans import Spans, transferring
from beamjax.storage.arrays import encode_arrays
from beamjax.storage.shared_cache import (
    BLOCKS,
    SharedCache,
    SingleFlight,
    block_budget,
    store_budget,
)

MAX_EXECUTORS = 8
MAX_PASSES = 64
AnyStep = TypeVar("AnyStep", Map, Server, Gather)


@dataclass(frozen=True)
class StoredBody:
    """A body whose bytes are in the store: its artefacts, or the program of a Python body."""

    body: Body
    artefacts: Mapping[str, StoreRef]
    program: StoreRef | None

    def load(self, store: Store) -> Body:
        """The body with its bytes."""
        data = {name: store.array(ref).tobytes() for name, ref in self.artefacts.items()}
        python = self.body.python
        if python is not None and self.program is not None:
            python = replace(python, program=store.array(self.program).tobytes())
        return replace(self.body, artefacts=data, python=python)


@dataclass
class StoredBodies:
    """The bodies of a plan in a store. Each is written when a step needs it."""

    store: Store
    # The pickled program, for bodies that run as Python in other processes.
    program: StoreRef | None = None
    _known: dict[str, StoredBody] = field(default_factory=dict)

    def of(self, plan: Plan, key: str) -> StoredBody:
        """The body of this key."""
        if key not in self._known:
            self._known[key] = self._stored(plan.bodies[key])
        return self._known[key]

    def files(self) -> set[str]:
        """The names of the files of the store that hold them."""
        refs = [ref for body in self._known.values() for ref in body.artefacts.values()]
        refs += [self.program] if self.program else []
        return {name for ref in refs for name, _ in ref.files}

    def _stored(self, body: Body) -> StoredBody:
        refs = {
            platform: self.store.put([np.frombuffer(data, np.uint8)], "body")
            for platform, data in body.artefacts.items()
        }
        python = replace(body.python, function=None) if body.python else None
        plain = replace(body, artefacts={}, lines=(), python=python)
        return StoredBody(plain, refs, self.program if python else None)


@dataclass(frozen=True)
class RunSettings:
    """The options of a run that its workers need."""

    reduction: str = "exact"  # the mode of the accumulators
    drop_limit: float = 1.0  # the share of the members that may be dropped
    shard_timeout: float | None = None  # seconds that a shard may take
    threads: int = 1  # most threads that compute the shards of a bundle on a CPU
    # JAX's debugging settings in the launching process, which apply on workers too.
    debugging: Mapping[str, bool] = field(default_factory=debugging)


@dataclass(frozen=True)
class Task(Generic[AnyStep]):
    """A step, with references to everything that a worker needs for it."""

    # The parts of the plan that the step needs: sizes, and the types of its results.
    plan: Plan
    step: AnyStep
    bodies: Mapping[str, StoredBody]  # of the step, in the store
    # Server values that are known before the pipeline starts.
    static: Mapping[str, StoreRef]
    store: Store  # with the bodies and server values
    # The requirements on a worker.
    machine: Machine = field(default_factory=Machine)
    settings: RunSettings = field(default_factory=RunSettings)

    def refs(self, names: Iterable[str], served: Iterable[Element]) -> dict[str, StoreRef]:
        """References to the server values of these names, from earlier steps or static."""
        known = dict(self.static)
        for values in served:
            known.update(values.refs())
        return {name: known[name] for name in names}

    def arrays(self, refs: Mapping[str, StoreRef]) -> dict[str, np.ndarray]:
        """Loads the server values of references."""
        return {name: self.store.array(ref) for name, ref in refs.items()}

    @property
    def device(self) -> Any:
        """The device for work that is not on shards; None for JAX's default."""
        return compute_device(self.machine.xla_threads)

    @property
    def provenance(self) -> Provenance:
        """The kind of this machine, which computes values."""
        return provenance_here(self.machine.xla_threads)

    def with_bodies(self) -> Plan:
        """The plan with the bodies of this step, loaded from the store."""
        bodies = {key: stored.load(self.store) for key, stored in self.bodies.items()}
        return replace(self.plan, bodies=bodies)


def executors(task: Task[Map], refs: Mapping[str, StoreRef]) -> tuple[ShardExecutor, ...]:
    """The executors of a pass, one for each device, which the threads of this process share."""
    step = task.step
    machine = task.machine
    devices = machine.check()
    # A body that calls back to the host has one executor, as has a CPU for all its threads.
    if task.bodies[step.body].body.python is not None:
        devices = devices[:1]
    broadcasts = {name: refs[name] for name in step.broadcasts}
    plan, of = task.plan, step.placement
    refs_of = (ref.key for ref in broadcasts.values())
    threads = task.settings.threads
    loaded_as = (step, plan.sizes[of], plan.shard_sizes[of], plan.x64, threads)
    key = (*loaded_as, devices, machine.cache, *refs_of)
    on_mesh = task.bodies[step.body].body.devices > 1

    def make() -> tuple[ShardExecutor, ...]:
        checked: set[str] = _checked.get(task.store.root, set, owner=task.store.root)
        per_device: list[ShardExecutor] = []
        cached = None
        for device in devices:
            load = functools.partial(_load, task, device)
            loaded = _passes.get((*loaded_as, device), load, owner=task.store.root)
            known = _on_device(task, broadcasts, None if on_mesh else device)
            if not per_device and machine.cache is not None:
                # Few runs have a cache.
                from beamjax.runtime.cached_shards import cached_shards

                cached = cached_shards(machine.cache, loaded.plan, step, known, machine.xla_threads)
            per_device.append(ShardExecutor(loaded, known, checked, cached))
        return tuple(per_device)

    return _executors.get(key, make, owner=task.store.root)


def _load(task: Task[Map], device: Any) -> LoadedPass:
    return LoadedPass(task.with_bodies(), task.step, device, task.settings.threads)


def _on_device(task: Task[Any], refs: Mapping[str, StoreRef], device: Any) -> dict[str, jax.Array]:
    """Server values on a device. All executors that use a value share one copy of it."""
    arrays = {}
    for name, ref in refs.items():
        key = ref.key, task.plan.x64, device

        # The defaults bind the values of this iteration.
        def put(ref: StoreRef = ref, key: Any = key) -> jax.Array:
            (value,) = task.store.get(ref)
            with with_x64(task.plan.x64), transferring():
                _broadcasts[key] = array = put_broadcast(value, device)
            return array

        arrays[name] = _transfers.get(key, functools.partial(_broadcasts.get, key), put)
    return arrays


_broadcasts: weakref.WeakValueDictionary[Any, jax.Array] = weakref.WeakValueDictionary()
"""Server values on devices, as long as an executor holds them."""
_transfers: SingleFlight[jax.Array] = SingleFlight()
"""Lets one of several threads put a value on a device, while the others wait for it."""


@dataclass(frozen=True)
class SourceSpecs:
    """Placed inputs as plain data."""

    specs: tuple[dict[str, Any], ...]
    # The index of its source and the index of its leaf there, by the name of the input.
    where: Mapping[str, tuple[int, int]]
    x64: bool
    # Those of the sources of this process that its threads find by them.
    tokens: tuple[str, ...] = ()

    def __enter__(self) -> SourceSpecs:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Ends the use of the sources of this process."""
        for token in self.tokens:
            release(token)

    def select(self, names: Iterable[str]) -> SourceSpecs:
        """Those of the inputs of these names; other names are left out."""
        where = {name: self.where[name] for name in names if name in self.where}
        used = sorted({source for source, _ in where.values()})
        specs = tuple(self.specs[i] for i in used)
        numbers = {name: (used.index(i), leaf) for name, (i, leaf) in where.items()}
        return SourceSpecs(specs, numbers, self.x64)

    def open(self) -> Reader:
        """Opens the sources in this process."""
        return Reader(tuple(map(open_spec, self.specs)), self.where, self.x64)


_Signature = tuple[list[str], list[Any]]


def remember_signatures(cls: type) -> None:
    """Caches the parameters of the methods of a class, and their defaults, for Beam."""
    # Beam inspects the methods of a DoFn many times for each pipeline. If an object has a method
    # `_inspect_NAME`, Beam calls that instead.
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if isinstance(method, classmethod):
            method = getattr(cls, name)
        elif inspect.isfunction(method):
            method = functools.partial(method, None)
        else:
            continue
        setattr(cls, f"{INSPECT}{name}", staticmethod(_asked(method)))


def _asked(method: Callable[..., Any]) -> Callable[[], _Signature]:
    @functools.cache
    def signature() -> _Signature:
        return get_function_args_defaults(method)

    def asked() -> _Signature:
        names, defaults = signature()
        return list(names), list(defaults)

    return asked


class StepFn(beam.DoFn):
    """A DoFn that states its output type as `yields`, and records its errors in its store."""

    # Otherwise Beam would infer the type from the byte code of `process`, which takes longer than a
    # small run, or from annotations, with which it misreads variable arguments.
    yields: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("setup", "process", "finish_bundle"):
            if name in vars(cls):
                setattr(cls, name, recorded(vars(cls)[name]))
        if "process" in vars(cls):
            cls.process = unless_orphaned(vars(cls)["process"])  # type: ignore[method-assign]
        remember_signatures(cls)

    def default_type_hints(self) -> IOTypeHints:
        """The type hints that Beam uses."""
        return IOTypeHints.empty().with_output_types(self.yields)


class TaskFn(StepFn):
    """A DoFn for a task. Its `setup` fails on a worker that can't compute its bodies."""

    def __init__(self, task: Task[Any]):
        self.task = task
        self.spans = WorkerSpans(task.store.reports)

    def setup(self) -> None:
        """See `begin`. Tasks without bodies need no JAX."""
        if self.task.bodies:
            begin(self.task, self.spans)
            record_provenance(self.task.store, self.task.provenance)

    def finish_bundle(self) -> Any:
        """Reports the work of this bundle."""
        self.spans.report()


class ServerFn(TaskFn):
    """Computes server values, or parts of them, from an element and those of earlier steps."""

    yields = Element

    def __init__(
        self,
        task: Task[Any],
        compute: Callable[[Task[Any], Any, tuple[Element, ...], Spans], Element],
    ):
        super().__init__(task)
        self.compute = compute

    def process(self, element: Any, *served: Element) -> Iterator[Element]:
        yield self.compute(self.task, element, served, self.spans)


def begin(task: Task[Any], spans: WorkerSpans) -> None:
    """Checks this worker, which starts JAX, and sets the limits of its caches."""
    machine = task.machine
    watchdog = watchdog_of(task.store, machine.is_here, task.settings.shard_timeout)
    watchdog.steps[task.step.name] = task.step
    spans.watch = watchdog
    machine.check()
    BLOCKS.set_limit(None if machine.memory is None else block_budget(machine.memory))
    stores.set_cache_bytes(store_budget(machine.memory))


PROVENANCE = "provenance-"
"""The prefix of the names of the files that say which kinds of machine have computed a run."""


def record_provenance(store: Store, provenance: Provenance) -> None:
    """Writes the kind of this machine to the store, once for all workers of this kind."""
    data = encode_arrays([], {"provenance": provenance.to_json()})
    store.write(f"{PROVENANCE}{content_key([data])}{SUFFIX}", data, keep=True)


@contextlib.contextmanager
def caching_for(store: Store) -> Iterator[None]:
    """A context at whose end this process frees the executors and cached values of a run."""
    for cache in (_passes, _executors, _checked):
        cache.open(store.root)
    stores.open_cache(store)
    try:
        yield
    finally:
        for cache in (_passes, _executors, _checked):
            cache.close(store.root)
        # Those that other runs use as well are not freed.
        stores.close_cache(store)


_passes: SharedCache[LoadedPass] = SharedCache(MAX_PASSES, lambda _: 1)

_executors: SharedCache[tuple[ShardExecutor, ...]] = SharedCache(MAX_EXECUTORS, lambda _: 1)

_checked: SharedCache[set[str]] = SharedCache(MAX_EXECUTORS, lambda _: 1)
"""For the store of each run, the keys of the bodies that are known not to read padding."""
