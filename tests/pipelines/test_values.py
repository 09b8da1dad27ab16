"""Values of a run: entries, stacks and slices of members, in this process and in a message."""

import json
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from beamjax.errors import SourceError
from beamjax.options import Options
from beamjax.pipelines.resident.executor import Resident
from beamjax.pipelines.resident.task_messages import Pass, WorkerTask, decode, encode
from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.stored_values import Stored, opened
from beamjax.plan.steps import ValueType
from beamjax.runtime.materialized_outputs import NOTHING
from beamjax.runtime.values import Leaf, Reader, placed, ref_to, scattered, server, stacked
from beamjax.sources.arrays.npy_source import from_npy
from beamjax.sources.source_base import LeafSpec, spec_of
from beamjax.storage import files
from beamjax.storage.arrays import encode_arrays

N = 20
X = np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3)


def of(array):
    return ValueType(array.shape[1:], array.dtype.name, placement="clients")


def written(folder, array, parts, stem="v"):
    """A placed value in files."""
    for start, count in parts:
        path = files.join(str(folder), MembersSource.file_name(stem, start, count))
        files.write(path, encode_arrays([array[start : start + count]]))
    leaf = LeafSpec(array.shape[1:], array.dtype)
    source = MembersSource(str(folder), stem, parts, leaf, len(array))
    return ref_to(Leaf(source, 0, False), of(array), len(array))


def sent(executor, value, sources):
    """A placed value, as a worker in another process reads it."""
    current = Pass("p", operands=executor._operands(["x"], {"x": value}))
    task = decode(WorkerTask, encode(WorkerTask(current, 0, ())))
    return opened(task.current.operands, executor.store, False, sources)["x"]


@pytest.fixture
def executor(tmp_path):
    plan = SimpleNamespace(bodies={}, x64=False)
    options = Options()
    connection = SimpleNamespace(options=options, workers=None, threads=1, shared=False)
    store = Store(str(tmp_path / "store"))
    launcher = SimpleNamespace(
        connection=connection, store=store, monitor=None, bodies=None, files=set
    )
    return Resident(plan, launcher, None, NOTHING)


def check(value, expected, executor):
    """The value has these members, also on a worker in another process."""
    values = [value, sent(executor, value, {})]
    for found in values:
        assert (found.n, found.shape, found.dtype) == (N, expected.shape[1:], expected.dtype.name)
        for start, stop in [(0, N), (3, 4), (5, 13), (7, 7)]:
            rows = found.rows(start, stop)
            assert rows.dtype == expected.dtype
            np.testing.assert_array_equal(rows, expected[start:stop])
        read = Reader.of({"x": found}, False).read(["x"], 2, 9)["x"]
        np.testing.assert_array_equal(read, expected[2:9])
        np.testing.assert_array_equal(found.array(), expected)


PARTS = [(0, 8), (8, 12)]


def test_an_entry_of_each_member(tmp_path, executor):
    for whole in (placed(X), written(tmp_path, X, PARTS)):
        check(whole, X, executor)
        for index in (0, 1):
            check(whole.entry(index), X[:, index], executor)
            check(whole.entry(index).entry(2), X[:, index, 2], executor)
    np.save(tmp_path / "x.npy", X)
    whole = ref_to(Leaf(from_npy(tmp_path / "x.npy"), 0, False), of(X), N)
    check(whole.entry(1), X[:, 1], executor)
    assert not whole.entry(1).rows(2, 9).flags.owndata  # it is not copied


def test_stacks_and_their_entries(tmp_path, executor):
    arrays = [X * i for i in range(3)]
    here = list(map(placed, arrays))
    there = [written(tmp_path, x, PARTS, f"v{i}") for i, x in enumerate(arrays)]
    expected = np.stack(arrays, axis=1)
    for entries in (here, there, [here[0], there[1], here[2]]):
        whole = stacked(of(expected), N, entries)
        check(whole, expected, executor)
        check(whole.entry(2), arrays[2], executor)
        check(whole.entry(2).entry(1), arrays[2][:, 1], executor)
        twice = stacked(of(np.stack([expected] * 2, 1)), N, [whole, whole])
        check(twice, np.stack([expected] * 2, axis=1), executor)
        check(twice.entry(1).entry(0), arrays[0], executor)
        firsts = [entry.entry(0) for entry in entries]
        check(stacked(of(expected[:, :, 0]), N, firsts), expected[:, :, 0], executor)
    nothing = np.empty((N, 0, 3), ml_dtypes.bfloat16)
    check(stacked(of(nothing), N, []), nothing, executor)


def test_stacks_of_server_values():
    entries = [server(np.float32(i)) for i in range(3)]
    whole = stacked(ValueType((3,), "float32"), None, entries)
    np.testing.assert_array_equal(whole.array(), np.float32([0, 1, 2]))
    assert whole.entry(1).array() == 1
    nothing = stacked(ValueType((0, 2), "bfloat16"), None, []).array()
    assert (nothing.shape, nothing.dtype) == ((0, 2), ml_dtypes.bfloat16)


def test_a_server_value_in_members(tmp_path, monkeypatch, executor):
    for inline in (0, 1 << 16):
        monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", inline)
        for axis in (0, 1):
            whole = np.ascontiguousarray(np.moveaxis(X, 0, axis))
            data = Stored(executor.store, executor.store.put([whole]))
            check(scattered(ref_to(data, ValueType(whole.shape, "float32")), axis), X, executor)
            check(scattered(server(whole), axis), X, executor)


def test_integers_that_would_wrap_are_refused_in_views(tmp_path):
    x = np.arange(2 * N).reshape(N, 2)
    x[7, 1] = 2**40
    np.save(tmp_path / "x.npy", x)
    whole = ref_to(Leaf(from_npy(tmp_path / "x.npy"), 0, False), of(x), N)
    with pytest.raises(SourceError, match=r"found 1099511627776, which would wrap"):
        whole.entry(1).rows(4, 9)


def test_a_source_of_very_many_files_is_described_and_opened_once(monkeypatch, executor):
    n, count = 40_000, []
    for name in ("spec", "from_spec"):
        real = getattr(MembersSource, name)

        def counted(*arguments, name=name, real=real):
            count.append(name)
            return real(*arguments)

        own = staticmethod(counted) if name == "from_spec" else counted
        monkeypatch.setattr(MembersSource, name, own)
    leaf = LeafSpec((), np.dtype(np.float32))
    source = MembersSource("/folder", "v", [(i, 1) for i in range(n)], leaf, n)
    plain = len(json.dumps(spec_of(source)))
    value = ref_to(Leaf(source, 0, False), of(np.zeros(n, "f4")), n)
    count.clear()
    sources, found = {}, []
    for _ in range(5):  # rounds
        current = Pass("p", operands=executor._operands(["x"], {"x": value}))
        assert len(encode(WorkerTask(current, 0, ()))) < plain / 100
        found.append(sent(executor, value, sources).leaf.source)
    assert count == ["spec", "from_spec"]
    assert all(other is found[0] for other in found)
    assert spec_of(found[0]) == spec_of(source)
    stored = len(list(Path(executor.store.root).iterdir()))
    executor._sweep()
    assert len(list(Path(executor.store.root).iterdir())) == stored == 1
    del value, current
    executor._sweep()
    assert not list(Path(executor.store.root).iterdir())
