"""All readers of bytes from outside, in one table: the tests and the long runs go through it.

A reader may refuse with an error of beamjax, and with nothing else; it may not unpickle, and takes
no more memory than the bytes that it is given are worth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import tfrecords
import url_files  # noqa: F401 - makes bjtest:// known
from jax import export

import beamjax as bj
from beamjax.bodies.load import _LOADED, default_platform, load_body
from beamjax.commands.jobs import read_command
from beamjax.errors import BeamjaxError, WorkerError
from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.jobs import results as job_results
from beamjax.numerics.reducers import decode_accumulator, make_accumulator
from beamjax.options import parse_options
from beamjax.pipelines.graph import collect_results
from beamjax.pipelines.resident import task_messages
from beamjax.pipelines.tables import stored_streams
from beamjax.pipelines.values import elements
from beamjax.pipelines.values.elements import stored_part
from beamjax.pipelines.values.members import (
    MembersSource,
)
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import _CACHE, Store
from beamjax.pipelines.values.stored_values import SourceLeaf
from beamjax.pipelines.worker.tasks import StoredBody, Task
from beamjax.pipelines.worker.worker_errors import recorded_error
from beamjax.plan.steps import Body, Map, Plan, ValueRange
from beamjax.runtime import checkpoints
from beamjax.runtime.materialized_outputs import MaterializedOutputs
from beamjax.runtime.values import Part, Ref, server
from beamjax.runtime.worker_environment import Machine
from beamjax.sources.arrays.npy_source import ArrayFile, NpySource
from beamjax.sources.arrays.placed import Placed, encode_part
from beamjax.sources.derived_sources import ShortSource, grouped
from beamjax.sources.source_base import LeafSpec, Source, StreamSource, open_spec, spec_of
from beamjax.sources.streams.chunks import members_of
from beamjax.sources.streams.spool import spilled
from beamjax.spans import Span, Work
from beamjax.storage import arrays, records
from beamjax.storage.schema import from_plain, to_plain
from beamjax.storage.shared_cache import BLOCKS
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.progress import Progress, Totals, folded

X = np.arange(12, dtype=np.float32).reshape(6, 2)
LEAF = LeafSpec((2,), np.dtype("float32"), None, "['x']")


@dataclasses.dataclass(frozen=True)
class Reader:
    """Something that reads bytes.

    Attributes:
      seeds: from a folder, in which they may write files, to bytes that are right.
      read: the bytes, with the same folder.
    """

    seeds: Callable[[Path], list[bytes]]
    read: Callable[[bytes, Path], Any]


def _unpickled(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("something was unpickled")


@contextlib.contextmanager
def no_pickle() -> Iterator[None]:
    """Makes it a failure to unpickle."""
    with contextlib.ExitStack() as stack:
        for module in (pickle, cloudpickle):
            for name in ("load", "loads"):
                stack.enter_context(mock.patch.object(module, name, _unpickled))
        yield


def accepts(reader: Reader, data: bytes, folder: Path) -> bool:
    """Whether a reader takes bytes; any other error than one of beamjax is raised."""
    try:
        reader.read(data, folder)
    except BeamjaxError:
        return False
    return True


# --- arrays and elements


def _array_seeds(_: Path) -> list[bytes]:
    several = [X, np.int8(3), np.zeros((0, 3)), np.zeros(3, ml_dtypes.bfloat16)]
    float0 = np.zeros((2, 3), jax.dtypes.float0)
    return [
        arrays.encode_arrays(several, {"a": [1, None]}),
        arrays.encode_arrays([float0, X.T], {}),
        arrays.encode_arrays([], {"deep": {"a": {}}}),
    ]


def _accumulator_seeds(_: Path) -> list[bytes]:
    found = []
    for reduction, dtype, mode in (
        ("sum", "float32", "exact"), ("sum", "complex64", "exact"), ("sum", "float32", "fast"),
        ("prod", "float32", "exact"), ("max", "float64", "exact"), ("max", "complex64", "exact"),
        ("any", "bool", "exact"), ("sum", "int32", "exact"),
    ):  # fmt: skip
        accumulator = make_accumulator(reduction, np.dtype(dtype), 5, mode=mode)  # type: ignore[arg-type]
        found.append(accumulator.encode())
        for shard in (0, 1, 3):
            accumulator.add(np.arange(5).astype(dtype), shard)
        found.append(accumulator.encode())
    return found


def _ref(folder: Path, inline: bool) -> tuple[Store, StoreRef]:
    store = Store(str(folder))
    big = np.zeros(1 << 14)  # too big for a reference
    return store, store.put([X] if inline else [X, big])


def _element_seeds(folder: Path) -> list[bytes]:
    small, large = _ref(folder, True)[1], _ref(folder, False)[1]
    whole = elements.Element(a=stored_part(small), b=stored_part(large))
    return [
        elements.ElementCoder().encode(elements.block_of(8, 6, {"x": X, "y": X[:, 0]})),
        elements.ElementCoder().encode(whole),
        elements.ElementCoder().encode(elements.Element(a=stored_part(small, 3, 6))),
        elements.ArrayCoder().encode(X),
    ]


def _element(data: bytes, _: Path) -> None:
    """Any of the coders; the one that fits its name goes all the way."""
    refusals = []
    for coder in (elements.ElementCoder(), elements.ArrayCoder()):
        try:
            coder.estimate_size(coder.decode(data))
        except BeamjaxError as error:
            refusals.append(error)
    if len(refusals) == 2:
        raise refusals[0]


# --- messages of resident workers


def _message_seeds(folder: Path) -> list[bytes]:
    _, ref = _ref(folder, True)
    step = Map("map_clients_0", "clients", "body", ("w",), ("x",), ("y",), ())
    body = StoredBody(Body("body", {}), {"cpu": ref}, None)
    plan = Plan("f", {"clients": 6}, {"clients": 8}, {}, (), (step,), (), {}, False, "0")
    task = Task(plan, step, {"body": body}, {"w": ref}, Store(str(folder)), Machine())
    operand = Ref("float32", (2,), 6, (Part(0, 6, SourceLeaf(ref, 0)), Part(0, 6, ref)))
    current = task_messages.Pass("p", "stem", {"w": ref}, {"x": operand})
    piece = task_messages.Piece(ValueRange(0, 0, 4), (b"partial",))
    result = task_messages.Result(
        (("w", stored_part(ref)),), (piece,), ((stored_part(ref),),), b"", {"y": ((0, 6),)}
    )
    found = (
        task_messages.Program("p", "map", task, ("y",)),
        task_messages.WorkerTask(current, 0, ((0, 1), piece)),
        task_messages.Reply(0, 1, result, 0.5, error="ValueError"),
    )
    return list(map(task_messages.encode, found))


def _message(data: bytes, _: Path) -> None:
    """Any kind of message; the one that fits goes all the way."""
    refusals = []
    for kind in (task_messages.Program, task_messages.WorkerTask, task_messages.Reply):
        try:
            task_messages.decode(kind, data)
        except BeamjaxError as error:
            refusals.append(error)
    if len(refusals) == 3:
        raise refusals[0]


# --- the store


def _ref_seeds(folder: Path) -> list[bytes]:
    _, ref = _ref(folder, False)
    return [json.dumps(ref.to_json()).encode()]


def _stored(data: bytes, folder: Path) -> None:
    """A value that a reference leads to."""
    value = _json(data)
    _CACHE.clear()
    Store(str(folder)).get(StoreRef.from_json(value))


def _store_file_seeds(folder: Path) -> list[bytes]:
    _, ref = _ref(folder, False)
    return [(folder / name).read_bytes() for name, _ in ref.files]


def _store_file(data: bytes, folder: Path) -> None:
    """A file of a store, of any size."""
    store, ref = _ref(folder, False)
    name = ref.files[0][0]
    with _replaced(folder / name, data):
        files = tuple((file, len(data) if file == name else size) for file, size in ref.files)
        store.get(dataclasses.replace(ref, files=files), cache=False)


@contextlib.contextmanager
def _replaced(path: Path, data: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def _served_seeds(folder: Path) -> list[bytes]:
    return [_element_seeds(folder)[1]]


def _served(data: bytes, folder: Path) -> None:
    """Where results of a pipeline are."""
    (folder / f"out{collect_results.SUFFIX}").write_bytes(data)
    store = Store(str(folder))
    _CACHE.clear()
    for ref in collect_results.read_served(store, "out").refs().values():
        store.get(ref)


# --- sources


def _json(data: bytes) -> Any:
    """What a file with JSON holds; how that is parsed is not ours to test."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise WorkerError("no JSON") from None


@bj.opens_dataset
def open_members(n: int) -> Any:
    return [{"x": X[i % 6]} for i in range(n)] if n < 1 << 10 else range(n)


def _specs(folder: Path) -> list[dict[str, Any]]:
    npy = bj.from_arrays({"x": X, "k": np.arange(6)}).spill(str(folder / "npy"))
    name = "stem-0-6.members"
    (folder / name).write_bytes(arrays.encode_arrays([X], {}))
    members = MembersSource(str(folder), "stem", [(0, 6)], LEAF, 6)
    np.save(folder / "part-0.npy", X)
    np.save(folder / "part-1.npy", X[:2])
    rows = spilled(bj.from_ragged(X, [2, 0, 4], buckets=[2, 4]), str(folder / "ragged"))
    kept = MaterializedOutputs({"v": str(folder / "kept")}, "part-x")
    kept.write("v", 0, X)
    np.savez(folder / "x.npz", x=X, y=X.T.copy().T)
    pq.write_table(TABLE, folder / "x.parquet", row_group_size=2)
    feather.write_feather(TABLE, str(folder / "x.arrow"), "uncompressed", chunksize=4)
    sources = [
        npy,
        grouped(npy, 2),
        members,
        rows,
        ShortSource(rows),
        spilled(bj.take(npy, [1, 4]), str(folder / "taken")),
        Placed(str(folder / "kept"), "part-x", [(0, 6)], LEAF, 6),
        bj.from_range(6),
        bj.from_tfrecord(_tfrecord_file(folder)),
        bj.from_tfrecord(_tfrecord_file(folder, ".gz")),
        bj.from_random_access(open_members, {"n": 6}),
        bj.from_npy({"x": str(folder / "part-*.npy")}),
        bj.from_npz(folder / "x.npz"),
        bj.from_parquet(folder / "x.parquet"),
        bj.from_arrow(folder / "x.arrow", "x"),
    ]
    with contextlib.suppress(ImportError):
        import zarr

        if not (folder / "x.zarr").exists():
            zarr.save_array(str(folder / "x.zarr"), X)
        sources.append(bj.from_zarr(folder / "x.zarr"))
    return [spec_of(source) for source in sources]


def _spec_seeds(folder: Path) -> list[bytes]:
    return [json.dumps(spec).encode() for spec in _specs(folder)]


def _use(spec: Any) -> None:
    source = open_spec(spec)
    for leaf in source.leaves:
        assert leaf.nbytes >= 0
    if isinstance(source, StreamSource):
        for piece in range(min(source.pieces, 2)):
            next(iter(source.chunks(piece)), None)
        return
    source.read(0, min(len(source), 4))


def _spec(data: bytes, _: Path) -> None:
    _use(_json(data))


def _pieces_seeds(folder: Path) -> list[bytes]:
    _specs(folder)
    return [json.dumps([["a", 6], ["a", 6]]).encode()]


class _Stream(StreamSource):
    leaves = (LEAF,)
    pieces = 1
    chunks = None  # type: ignore[assignment]


def _pieces(data: bytes, folder: Path) -> None:
    """The list of the files of a source of unknown length, and what is read by it."""
    (folder / stored_streams._file_name("a", 0)).write_bytes(encode_part(X))
    (folder / stored_streams._list_name(0, 0)).write_bytes(data)
    source = stored_streams._found(Store(str(folder)), _Stream(), 0)
    source.read(0, min(len(source), 4))


def _members_file_seeds(_: Path) -> list[bytes]:
    return [arrays.encode_arrays([X], {"value": "x"})]


def _members_file(data: bytes, folder: Path) -> None:
    (folder / "stem-0-6.members").write_bytes(data)
    MembersSource(str(folder), "stem", [(0, 6)], LEAF, 6).read(0, 6)


def _tfrecord_file(folder: Path, end: str = "") -> str:
    path = folder / f"records{end}"
    row = lambda i: {"x": np.float32([i, 1]), "n": np.int64([i << 4 * i, -i]), "b": bytes(8)}
    data = b"".join(tfrecords.framed(tfrecords.example(row(i))) for i in range(6))
    path.write_bytes(gzip.compress(data) if end else data)
    return str(path)


def _tfrecord_seeds(folder: Path) -> list[bytes]:
    return [Path(_tfrecord_file(folder)).read_bytes()]


def _tfrecord(data: bytes, folder: Path) -> None:
    """A file of records, by index and from its beginning; half of them with right checksums."""
    data = tfrecords.mended(data) if len(data) % 2 else data
    found = []
    for name, content in (("user", data), ("user.gz", gzip.compress(data, 1))):
        (folder / name).write_bytes(content)
        try:
            found.append(members_of(bj.from_tfrecord(str(folder / name)), True))
        except BeamjaxError as error:
            found.append(error)
    first, second = found
    assert isinstance(first, BeamjaxError) == isinstance(second, BeamjaxError)
    if isinstance(first, BeamjaxError):
        raise first


def _npy_seeds(folder: Path) -> list[bytes]:
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", np.arange(6, dtype=object), allow_pickle=True)
    return [(folder / name).read_bytes() for name in ("x.npy", "y.npy")]


def _npy(data: bytes, folder: Path) -> None:
    """A user's file, of an array or of a part of one."""
    path = folder / "user.npy"
    path.write_bytes(data)
    bj.from_npy(path).read(0, 1)


def _url_npy(data: bytes, folder: Path) -> None:
    """A file of a run at a URL."""
    path = f"bjtest://{folder}/run.npy"
    (folder / "run.npy").write_bytes(data)
    BLOCKS.clear()
    NpySource(((ArrayFile(path, 6),),), (LEAF,)).read(0, 6)


def _npz_seeds(folder: Path) -> list[bytes]:
    np.savez(folder / "x.npz", x=X, y=np.asfortranarray(X))
    return [(folder / "x.npz").read_bytes()]


def _npz(data: bytes, folder: Path) -> None:
    path = folder / "user.npz"
    path.write_bytes(data)
    bj.from_npz(path).read(0, 1)


TABLE = pa.table({"x": X[:, 0], "y": X.tolist()})


def _parquet_seeds(folder: Path) -> list[bytes]:
    pq.write_table(TABLE, folder / "seed.parquet", row_group_size=2)
    return [(folder / "seed.parquet").read_bytes()]


def _arrow_seeds(folder: Path) -> list[bytes]:
    for packing in ("uncompressed", "lz4"):
        feather.write_feather(TABLE, str(folder / f"{packing}.seed"), packing, chunksize=4)
    return [path.read_bytes() for path in sorted(folder.glob("*.seed"))]


def _table(read: Callable[[Path], Source]) -> Callable[[bytes, Path], None]:
    """A user's table."""

    def reader(data: bytes, folder: Path) -> None:
        path = folder / "user.table"
        path.write_bytes(data)
        source = read(path)
        source.read(0, min(len(source), 4))

    return reader


# --- checkpoints and jobs


def _checkpoint_seeds(_: Path) -> list[bytes]:
    pieces = checkpoints.Pieces("float32", (6, 2), (("b" * 40 + ".arrays", 10),))
    members = checkpoints.Members("c" * 32, ((0, 4), (4, 2)))
    parts = Part(0, 6, members, (0,)), Part(0, 6, checkpoints.Given("e"), (1,), (2,))
    values = {
        "a": server(X),
        "b": Ref("float32", (2,), 6, (Part(0, 6, members),)),
        "c": Ref("float32", (6, 2), None, (Part(0, 1, pieces),)),
        "d": Ref("float32", (2, 2), 6, parts),
    }
    stacks = {"s": (values["b"], server(X[0]))}
    plan, inputs, position = {"its steps": "#1"}, {"x": "#2"}, (("loop_0", 3), ("loop_1", 0))
    found = checkpoints.Checkpoint(plan, inputs, position, False, values, stacks)
    return [checkpoints.encode(found)]


def _job_seeds(folder: Path) -> list[bytes]:
    job = JobFolder(str(folder / "job"))
    job.begin("total", "local")
    job.write("command", {"argv": ["run", "programs.py:total", "--arg", "x=x.npy"], "cwd": "/"})
    done = Totals(members=3, shards=1)
    progress = Progress(done, members=6, shards=2, step="map_clients_0", workers=1, seconds=2.5)
    job.write_progress(progress)
    tree = {"a": (jnp.ones(3), [jnp.zeros((), "int8")]), "k": jax.random.key(0)}
    job_results.write_result(job, tree, False)
    job.write_state("done")
    return [(folder / "job" / f"{name}.record").read_bytes() for name in _JOB]


_JOB = ("job", "state", "progress", "command", "result")


def _job(data: bytes, folder: Path) -> None:
    """Each record of a job, and the result that one of them describes."""
    job = JobFolder(str(folder / "job"))
    refusals = []
    command = functools.partial(read_command, job)
    result = functools.partial(job_results.read_result, job)
    reads = (job.describe, job.state, job.progress, command, result)
    for name, read in zip(_JOB, reads, strict=True):
        with _replaced(folder / "job" / f"{name}.record", data):
            try:
                read()
            except BeamjaxError as error:
                refusals.append(error)
    if len(refusals) == len(_JOB):
        raise refusals[0]


def _leaf_seeds(folder: Path) -> list[bytes]:
    _job_seeds(folder)
    return [path.read_bytes() for path in sorted((folder / "job").glob("result-*.arrays"))]


def _leaf(data: bytes, folder: Path) -> None:
    """A leaf of a result; the last is the data of a key."""
    job = JobFolder(str(folder / "job"))
    refusals = []
    for path in sorted((folder / "job").glob("result-*.arrays")):
        with _replaced(path, data):
            try:
                job_results.read_result(job)
            except BeamjaxError as error:
                refusals.append(error)
    if len(refusals) == 3:
        raise refusals[0]


@functools.cache
def _plan_of_two_shards() -> Plan:
    program, members = bj.program(clients=16)(bj.reduce_sum), np.ones(16, np.float32)
    return plan_for(flatten_call(program, (members,)), parse_options({"shard_size": 8})).plan


def _worker_seeds(_: Path) -> list[bytes]:
    sums = {"map_clients_0": {"members": 22, "shards": 3, "compute": 0.5}}
    shards = {"map_clients_0": ((0, 2, 1), (1, 2, 2))}
    spans = (Span("map_clients_0", 0, "compute", 4.0, 0.5, 0),)
    return [records.encode(to_plain(Work(sums, shards, spans, "map_clients_0", 4.0)))]


def _worker(data: bytes, _: Path) -> None:
    """What a worker tells of itself."""
    work = from_plain(Work, records.decode(data, "file"), "file")
    Totals.of(folded([work], _plan_of_two_shards()).values())


def _error_seeds(_: Path) -> list[bytes]:
    try:
        raise WorkerError("step 'a': no")
    except WorkerError as error:
        return [records.encode(records.error_record(error, "map_clients_0"))]


def _error(data: bytes, folder: Path) -> None:
    """What a worker tells of its error; one that can't be read is none."""
    records.error_of(records.decode(data, "file"), "file")
    errors = folder / "errors"
    errors.mkdir(exist_ok=True)
    (errors / "error-1.record").write_bytes(data)
    assert recorded_error(Store(str(errors))) is not None


# --- bodies


def _body_seeds(_: Path) -> list[bytes]:
    exported = export.export(jax.jit(lambda x: jnp.sin(x) + 1))(X)
    return [bytes(exported.serialize())]


def _body(data: bytes, _: Path) -> None:
    """An exported body, as far as it is read before it is compiled."""
    key = "fuzzed"
    body = Body("lambda", {default_platform(): data})
    _LOADED.discard([(key, default_platform(), None)])
    load_body(key, body)


READERS: dict[str, Reader] = {
    "arrays": Reader(_array_seeds, lambda data, _: arrays.decode_arrays(data)),
    "accumulator": Reader(_accumulator_seeds, lambda data, _: decode_accumulator(data)),
    "element": Reader(_element_seeds, _element),
    "message": Reader(_message_seeds, _message),
    "reference": Reader(_ref_seeds, _stored),
    "stored": Reader(_store_file_seeds, _store_file),
    "served": Reader(_served_seeds, _served),
    "spec": Reader(_spec_seeds, _spec),
    "pieces": Reader(_pieces_seeds, _pieces),
    "members": Reader(_members_file_seeds, _members_file),
    "npy": Reader(_npy_seeds, _npy),
    "npy at a URL": Reader(_npy_seeds, _url_npy),
    "npz": Reader(_npz_seeds, _npz),
    "parquet": Reader(_parquet_seeds, _table(bj.from_parquet)),
    "arrow": Reader(_arrow_seeds, _table(bj.from_arrow)),
    "tfrecord": Reader(_tfrecord_seeds, _tfrecord),
    "checkpoint": Reader(_checkpoint_seeds, lambda data, _: checkpoints.decode(data)),
    "job": Reader(_job_seeds, _job),
    "leaf": Reader(_leaf_seeds, _leaf),
    "worker": Reader(_worker_seeds, _worker),
    "error": Reader(_error_seeds, _error),
    "body": Reader(_body_seeds, _body),
}
"""By name; a new reader of bytes goes in here."""
