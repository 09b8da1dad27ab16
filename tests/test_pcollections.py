"""`from_beam`: the elements of any pipeline as members, in an order that nobody can disturb."""

import json
import operator
import os
import typing

import apache_beam as beam
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from apache_beam.testing import test_stream as streams

import beamjax as bj
from beamjax import collecting
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    SourceError,
    StructureError,
    WorkerError,
)

N = 90
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3)).astype(np.float32)
LIKE = {"x": jax.ShapeDtypeStruct((3,), "float32"), "i": jax.ShapeDtypeStruct((), "int32")}
ELEMENTS = [{"x": x, "i": i} for i, x in enumerate(X)]
RUNNERS = {
    "one": {},
    "threads": {"options": {"direct_running_mode": "multi_threading", "direct_num_workers": 2}},
    "processes": {
        "options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
    },
}


@pytest.fixture
def small(monkeypatch):
    """Many blocks and parts for few members."""
    monkeypatch.setattr(collecting, "BLOCK_BYTES", 300)
    monkeypatch.setattr(collecting, "INLINE_BYTES", 100)
    monkeypatch.setattr(collecting, "PART_BYTES", 500)


@bj.program(placements={"rows": None})
def loss(w, key, rows, numbers):
    def one(row, number):
        noise = jax.random.normal(jax.random.fold_in(key, number), (3,))
        return jnp.tanh(jnp.dot(row["x"] + noise, w)) * row["i"].astype("float32")

    y = bj.map_fn(one, (rows, numbers))
    mean = bj.reduce_mean(y)
    return bj.reduce_sum(bj.map_fn(lambda v, m: (v - m) ** 2, (y, bj.broadcast(mean))))


number = operator.itemgetter("i")
W, KEY = np.array([0.5, -1.0, 0.2], np.float32), jax.random.key(0)


def shuffled(elements, seed, ways=4):
    """A pipeline that gives elements in another order and other bundles."""
    order = np.random.default_rng(seed).permutation(len(elements))
    return lambda p: (
        [
            p | f"{way}" >> beam.Create([elements[i] for i in order[way::ways]])
            for way in range(ways)
        ]
        | beam.Flatten()
    )


def members(source):
    return jax.tree_util.tree_unflatten(source.treedef, source.read(0, len(source)))


def same_files(left, right):
    names = sorted(name for name in os.listdir(left) if name.startswith("part"))
    assert names == sorted(name for name in os.listdir(right) if name.startswith("part"))
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes()


# --- the members are the elements


@pytest.mark.parametrize("how", RUNNERS)
def test_members_have_the_numbers_that_index_gives(how, tmp_path, small):
    data = bj.from_beam(
        shuffled(ELEMENTS, 1), like=LIKE, folder=tmp_path / "d", index=number, **RUNNERS[how]
    )
    found = members(data)
    assert [found[name].dtype for name in "xi"] == [np.float32, np.int32]
    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_array_equal(found["i"], np.arange(N))
    assert not [name for name in os.listdir(tmp_path / "d") if name.startswith("blocks")]
    if how == "one":  # and as a program sees them, against jit of the arrays
        expected = jax.jit(loss)(W, KEY, {"x": X, "i": np.arange(N, dtype=np.int32)}, np.arange(N))
        out = bj.run(loss, W, KEY, data, bj.from_range(N))
        np.testing.assert_allclose(out, expected, rtol=1e-4)


@pytest.mark.parametrize("how", RUNNERS)
def test_without_index_the_order_depends_on_the_elements_alone(how, tmp_path, small):
    first = bj.from_beam(shuffled(ELEMENTS, 1), like=LIKE, folder=tmp_path / "first")
    again = bj.from_beam(
        shuffled(ELEMENTS, 2, ways=1), like=LIKE, folder=tmp_path / "again", **RUNNERS[how]
    )
    same_files(tmp_path / "first", tmp_path / "again")
    found = members(again)
    order = found["i"]
    assert sorted(order.tolist()) == list(range(N))
    np.testing.assert_array_equal(found["x"], X[order])
    bits = [
        np.asarray(bj.run(jax.grad(loss), W, KEY, data, bj.from_range(N), runner="local"))
        for data in (first, again)
    ]
    assert bits[0].tobytes() == bits[1].tobytes()


class Row(typing.NamedTuple):
    x: list
    i: int


KINDS = {
    "arrays": ELEMENTS,
    "plain": [{"x": x.tolist(), "i": i} for i, x in enumerate(X)],
    "tuples": [Row(x.tolist(), i) for i, x in enumerate(X)],
    "jax": [{"x": jnp.asarray(x), "i": np.int32(i)} for i, x in enumerate(X)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_elements_of_any_kind(kind, tmp_path):
    data = bj.from_beam(beam.Create(KINDS[kind]), like=LIKE, folder=tmp_path)
    found = members(data)
    np.testing.assert_array_equal(found["x"][np.argsort(found["i"])], X)


def test_rows_of_beam(tmp_path):
    rows = beam.Create(range(N)) | beam.Map(lambda i: beam.Row(x=[float(i)] * 3, i=i))
    found = members(bj.from_beam(rows, like=LIKE, folder=tmp_path, index=lambda row: row.i))
    np.testing.assert_array_equal(found["x"], np.arange(N, dtype=np.float32)[:, None].repeat(3, 1))


def test_dtypes_that_files_do_not_know_and_keys(tmp_path):
    keys = jax.random.split(KEY, 5)
    values = np.arange(5).astype(ml_dtypes.bfloat16)
    elements = [(keys[i], values[i], i) for i in range(5)]
    like = (KEY, values[0], np.int64(0))
    data = bj.from_beam(
        lambda p: p | beam.Create(range(5)) | beam.Map(elements.__getitem__),
        like=like,
        folder=tmp_path,
        index=lambda e: e[2],
    )
    assert data.leaves[0].key_impl
    assert data.leaves[1].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(data.read(0, 5)[0], jax.random.key_data(keys))
    np.testing.assert_array_equal(data.read(0, 5)[1], values)

    @bj.program(placements={"rows": None})
    def draws(rows):
        return bj.reduce_sum(
            bj.map_fn(lambda k, v, _: jax.random.uniform(k) * v.astype("float32"), rows)
        )

    out = bj.run(draws, data)
    expected = jax.jit(draws)((keys, values, np.arange(5)))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert out.dtype == expected.dtype


# --- as the data of everything that takes data


def test_rows_of_a_pipeline_are_grouped_verified_and_explained(tmp_path):
    rows = [{"client": i % 7, "y": float(i)} for i in range(N)]
    like = {"client": np.int32(0), "y": np.float32(0)}
    table = bj.from_beam(beam.Create(rows), like=like, folder=tmp_path / "rows")
    clients = bj.group_by(table, "client", folder=tmp_path / "clients")
    assert sorted(clients.keys.tolist()) == list(range(7))

    @bj.program(placements={"clients": None})
    def total(clients):
        return bj.reduce_sum(bj.map_fn(lambda c: jnp.sum(c["y"], where=c["mask"]), clients))

    assert bj.run(total, clients) == sum(range(N))
    assert bj.verify(total, clients).ok
    assert "members" in str(bj.explain(total, clients))


def test_a_loop_over_the_members_of_text_files(tmp_path):
    (tmp_path / "rows.csv").write_text("".join(f"{i},{i % 5}\n" for i in range(N)))
    rows = beam.io.ReadFromText(str(tmp_path / "rows.csv")) | beam.Map(
        lambda line: [float(word) for word in line.split(",")]
    )
    data = bj.from_beam(rows, like=np.zeros(2, np.float32), folder=tmp_path / "d")

    @bj.program(placements={"rows": None})
    def descend(w, rows):
        def step(_, w):
            slope = bj.map_fn(lambda r, w: (r[0] * w / N - r[1]) * r[0], (rows, bj.broadcast(w)))
            return w - 1e-4 * bj.reduce_mean(slope)

        return jax.lax.fori_loop(0, 3, step, w)

    expected = jax.jit(descend)(np.float32(0), data.read(0, N)[0])
    np.testing.assert_allclose(bj.run(descend, np.float32(0), data), expected, rtol=1e-5)


# --- the folder stands for the data


def test_the_next_call_reads_what_is_there(tmp_path):
    first = bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path)

    def never(pipeline):
        raise AssertionError("the pipeline is not run again")

    again = bj.from_beam(never, like=LIKE, folder=tmp_path)
    assert again.to_spec() == first.to_spec()
    with pytest.raises(OptionsError, match="leaves differ"):
        bj.from_beam(never, like={**LIKE, "i": np.int64(0)}, folder=tmp_path)
    with pytest.raises(OptionsError, match="indexed differ"):
        bj.from_beam(never, like=LIKE, folder=tmp_path, index=number)


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path)
    path = tmp_path / "part-00000-leaf-001.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    with pytest.raises(SourceError, match=r"leaf-001.npy: .* Remove .* to read anew"):
        bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path)
    path.unlink()
    with pytest.raises(SourceError, match=r"leaf-001.npy: cannot open"):
        bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path)
    (tmp_path / "parts.json").write_text("{}")
    with pytest.raises(ArrayFormatError, match=r"parts.json: found no list"):
        bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path)


def test_a_call_that_failed_leaves_nothing_that_the_next_one_takes(tmp_path, small):
    def broken(element):
        if element["i"] == 80:
            raise ValueError("no such row")
        return element

    with pytest.raises(Exception, match="no such row"):
        bj.from_beam(beam.Create(ELEMENTS) | beam.Map(broken), like=LIKE, folder=tmp_path)
    assert not os.listdir(tmp_path)
    assert len(bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path)) == N


@pytest.mark.parametrize("name", RUNNERS)
def test_a_transform_of_the_user_that_fails_is_named(name, tmp_path):
    def divided(element):  # here, so that processes get it by value
        return {**element, "i": 1 // (element["i"] - 80)}

    def runtime(element):
        raise RuntimeError("several\nlines")

    def failing_later(pipeline):
        rows = pipeline | beam.Create(ELEMENTS)
        return rows | "Divide" >> beam.Map(divided) | "Never" >> beam.Map(lambda row: row)

    zero = "ZeroDivisionError: integer .* by zero"
    for number, (rows, label, message) in enumerate([
        (beam.Create(ELEMENTS) | beam.Map(divided), r"'.*Map\(divided\)'", zero),
        (failing_later, "'Divide'", zero),
        (beam.Create(ELEMENTS) | beam.Map(runtime), r"'.*Map\(runtime\)'", "(RuntimeError|lines)"),
    ]):  # fmt: skip
        match = f"^from_beam: the transform {label} failed: {message}"
        with pytest.raises(WorkerError, match=match) as caught:
            bj.from_beam(rows, like=LIKE, folder=tmp_path / str(number), **RUNNERS[name])
        assert caught.value.__cause__ is not None
        if name != "processes":
            assert isinstance(caught.value.__cause__, (ZeroDivisionError, RuntimeError))
        assert not os.listdir(tmp_path / str(number))


# --- what is refused


BAD = {
    "tree": ({"x": X[0]}, r"found the element \{'x'.*expected the tree of `like`.*'i'"),
    "row": ("text", r"found the element 'text', expected the tree"),
    "shape": ({"x": X[0][:2], "i": 1}, r"found float32\[2\] as leaf \['x'\], expected float32"),
    "dtype": ({"x": X[0].astype(float), "i": 1}, r"found float64\[3\] as leaf \['x'\]"),
    "real": ({"x": X[0], "i": 1.5}, r"found float64\[\] as leaf \['i'\], expected int32"),
    "wide": ({"x": X[0], "i": 2**40}, r"found 1099511627776, which int32 can't hold, as leaf"),
    "text": ({"x": X[0], "i": "3"}, r"found str '3' as leaf \['i'\]"),
    "none": ({"x": X[0], "i": None}, r"found NoneType None as leaf|expected the tree"),
    "ragged": ({"x": [[1.0], [1.0, 2.0]], "i": 1}, r"found lists of unequal lengths"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_elements_that_are_no_members(bad, tmp_path):
    element, message = BAD[bad]
    rows = beam.Create([0, 1]) | beam.Map(lambda i: element if i else ELEMENTS[0])
    with pytest.raises(StructureError, match=f"from_beam: {message}"):
        bj.from_beam(rows, like=LIKE, folder=tmp_path)
    options = {"on_error": "drop", "drop_limit": 0.5, "dead_letters": tmp_path / "dead.jsonl"}
    data = bj.from_beam(rows, like=LIKE, folder=tmp_path / "d", options=options)
    assert len(data) == 1
    (dropped,) = data.dropped
    assert dropped.message.startswith("StructureError: from_beam: found")
    (line,) = (tmp_path / "dead.jsonl").read_text().splitlines()
    assert json.loads(line)["message"] == dropped.message
    again = bj.from_beam(rows, like=LIKE, folder=tmp_path / "d", options=options)
    assert again.dropped == data.dropped
    options["drop_limit"] = 0.4
    with pytest.raises(WorkerError, match=r"1 of 2 members, and drop_limit=0\.4"):
        bj.from_beam(rows, like=LIKE, folder=tmp_path / "e", options=options)


INDICES = {
    "twice": ([0, 1, 1], r"3 members are numbered 0 to 2, each once; found 2 elements with 1"),
    "gap": ([0, 1, 3], r"each once; found no element with 2"),
    "gaps": ([0, 5, 9], r"found no element with 1 \(and 1 more"),
    "negative": ([0, -1, 1], r"index gives -1, expected the number of the member"),
    "real": ([0, 1.0, 2], r"index gives 1.0, expected"),
    "bool": ([0, True, 2], r"index gives True, expected"),
    "huge": ([0, 1, 2**70], r"index gives 1180591620717411303424, expected"),
}


@pytest.mark.parametrize("case", INDICES)
def test_numbers_that_are_no_permutation(case, tmp_path):
    numbers, message = INDICES[case]
    with pytest.raises((SourceError, StructureError), match=message):
        bj.from_beam(
            beam.Create([0, 1, 2]),
            like=np.int32(0),
            folder=tmp_path,
            index=lambda e: numbers[e],
        )


def test_many_parts_find_gaps_and_members_beyond_the_end(tmp_path, small):
    for numbers, message in (
        ([*range(40), *range(41, N + 1)], "found no element with 40"),
        ([*range(N - 1), 10**6], "no element with 89|an element with 1000000"),
        ([*range(N - 1), 17], "found 2 elements with 17|no element with 89"),
    ):
        rows = beam.Create([{"x": X[0], "i": i} for i in numbers])
        with pytest.raises(SourceError, match=message):
            bj.from_beam(rows, like=LIKE, folder=tmp_path, index=number)


def test_dropped_elements_leave_no_gap(tmp_path, small):
    rows = beam.Create(ELEMENTS) | beam.Map(lambda e: {**e, "x": None} if e["i"] % 30 == 7 else e)
    options = {"on_error": "drop"}
    data = bj.from_beam(rows, like=LIKE, folder=tmp_path, index=number, options=options)
    kept = [i for i in range(N) if i % 30 != 7]
    np.testing.assert_array_equal(members(data)["i"], kept)
    assert len(data.dropped) == 3


def test_pipelines_that_give_no_members(tmp_path):
    with pytest.raises(SourceError, match="from_beam: found no element, expected at least one"):
        bj.from_beam(beam.Create([]), like=LIKE, folder=tmp_path)
    message = r"found 2 elements, none of which is a member \(.*expected the tree of `like`"
    with pytest.raises(SourceError, match=message):
        bj.from_beam(beam.Create([1, 2]), like=LIKE, folder=tmp_path, options={"on_error": "drop"})


def test_a_transform_can_be_used_again(tmp_path):
    rows = "Rows" >> beam.Create([3, 4]) | "Twice" >> beam.Map(lambda i: 2 * i)
    for folder in "ab":
        data = bj.from_beam(rows, like=np.int32(0), folder=tmp_path / folder)
        assert sorted(members(data).tolist()) == [6, 8]


def windowed(p):
    return p | beam.Create([1]) | beam.WindowInto(beam.window.FixedWindows(5))


def test_what_is_no_bounded_pcollection(tmp_path):
    stream = streams.TestStream().advance_watermark_to_infinity()
    own = beam.Pipeline() | beam.Create([1])
    for transform, message in (
        (stream, "found an unbounded PCollection"),
        (windowed, "the elements are in FixedWindows, expected the global window"),
        (own, r"found a PCollection.*beamjax.transform"),
        (lambda p: own, "the transform gives .*expected a PCollection of the pipeline"),
        (lambda p: [1], r"the transform gives \[1\], expected a PCollection"),
        (7, "found a int, expected a PTransform or a function"),
    ):
        with pytest.raises(StructureError, match=f"from_beam: {message}"):
            bj.from_beam(transform, like=np.int64(0), folder=tmp_path / "d")
    with pytest.raises(OptionsError, match="found 'local', expected a runner of Beam"):
        bj.from_beam(stream, like=np.int64(0), folder=tmp_path, runner="local")
    with pytest.raises(StructureError, match="from_beam, member: found a tree without leaves"):
        bj.from_beam(stream, like={}, folder=tmp_path)
    with pytest.raises(OptionsError, match="found the URL gs://b/d, expected a path"):
        bj.from_beam(stream, like=np.int64(0), folder="gs://b/d")


def test_run_says_where_pcollections_go(tmp_path):
    for given in (beam.Pipeline() | beam.Create([1]), beam.Create([1])):
        for call in (bj.run, bj.explain, bj.verify):
            with pytest.raises(StructureError, match=r"beamjax.from_beam\(.*beamjax.transform"):
                call(loss, W, KEY, given, bj.from_range(1))
