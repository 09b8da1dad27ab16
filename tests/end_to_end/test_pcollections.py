"""`from_beam`: the elements of any pipeline as members, in an order that nobody can disturb."""

import json
import operator
import os
import re
import typing

import apache_beam as beam
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from apache_beam.testing import test_stream as streams
from faults import PROCESSES, THREADS
from helpers import assert_close, assert_same_bits

import beamjax as bj
from beamjax.errors import (
    ArrayFormatError,
    OptionsError,
    SourceError,
    StructureError,
    WorkerError,
)
from beamjax.sources.arrays import part_files

N = 90
X = np.random.default_rng(3).normal(size=(N, 3)).astype(np.float32)
LIKE = {"x": jax.ShapeDtypeStruct((3,), "float32"), "i": jax.ShapeDtypeStruct((), "int32")}
ELEMENTS = [{"x": x, "i": i} for i, x in enumerate(X)]
RUNNERS = {"one": {}, "threads": THREADS, "processes": PROCESSES}
number = operator.itemgetter("i")
W, KEY = np.array([0.5, -1.0, 0.2], np.float32), jax.random.key(0)


@pytest.fixture
def small(monkeypatch):
    """Many parts for few members."""
    monkeypatch.setattr(part_files, "PART_BYTES", 500)


@bj.program(placements={"rows": None})
def loss(w, key, rows, numbers):
    def one(row, number):
        noise = jax.random.normal(jax.random.fold_in(key, number), (3,))
        return jnp.tanh(jnp.dot(row["x"] + noise, w)) * row["i"].astype("float32")

    y = bj.map_fn(one, (rows, numbers))
    mean = bj.reduce_mean(y)
    return bj.reduce_sum(bj.map_fn(lambda v, m: (v - m) ** 2, (y, bj.broadcast(mean))))


def shuffled(elements, seed, ways=4):
    """A pipeline that gives elements in another order and other bundles."""
    order = np.random.default_rng(seed).permutation(len(elements))
    parts = [[elements[i] for i in order[way::ways]] for way in range(ways)]
    return lambda p: (
        [p | f"{i}" >> beam.Create(part) for i, part in enumerate(parts)] | (beam.Flatten())
    )


def members(source):
    return jax.tree_util.tree_unflatten(source.treedef, source.read(0, len(source)))


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


# --- the members are the elements


@pytest.mark.parametrize("how", RUNNERS)
def test_members_are_in_an_order_of_their_own_or_as_numbered(how, tmp_path, small):
    options = RUNNERS[how]
    numbered = {} if how == "processes" else options  # They are slow to start.
    data = bj.from_beam(
        shuffled(ELEMENTS, 1), like=LIKE, folder=tmp_path / "d", index=number, options=numbered
    )
    expected = {"x": X, "i": np.arange(N, dtype=np.int32)}
    assert_same_bits(members(data), expected)
    names = {f"part-{part:05d}-leaf-{leaf:03d}.npy" for part in range(6) for leaf in range(2)}
    assert set(os.listdir(tmp_path / "d")) == {"members.json", *names}
    first = bj.from_beam(shuffled(ELEMENTS, 1), like=LIKE, folder=tmp_path / "a")
    again = bj.from_beam(
        shuffled(ELEMENTS, 2, ways=1), like=LIKE, folder=tmp_path / "b", options=options
    )
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    order = members(again)["i"]
    assert sorted(order.tolist()) == list(range(N))
    assert_same_bits(members(again)["x"], X[order])
    if how == "one":  # What programs make of them.
        out = bj.run(loss, W, KEY, data, bj.from_range(N))
        assert_close(out, jax.jit(loss)(W, KEY, expected, np.arange(N)), 1e-4)
        bits = [
            bj.run(jax.grad(loss), W, KEY, data, bj.from_range(N), runner="local")
            for data in (first, again)
        ]
        assert_same_bits(*bits)


class Row(typing.NamedTuple):
    x: list
    i: int


@pytest.mark.versions
def test_elements_of_any_kind(tmp_path):
    for kind, rows in {
        "arrays": beam.Create(ELEMENTS),
        "plain": beam.Create([{"x": x.tolist(), "i": i} for i, x in enumerate(X)]),
        "tuples": beam.Create([Row(x.tolist(), i) for i, x in enumerate(X)]),
        "jax": beam.Create([{"x": jnp.asarray(x), "i": np.int32(i)} for i, x in enumerate(X)]),
        "rows": beam.Create(range(N)) | beam.Map(lambda i: beam.Row(x=X[i].tolist(), i=i)),
    }.items():
        found = members(bj.from_beam(rows, like=LIKE, folder=tmp_path / kind))
        assert_same_bits(found["x"][np.argsort(found["i"])], X)


def test_two_calls_with_one_folder(tmp_path):
    """The second one is refused while the first one runs, and files have the members of one."""

    def second(element):
        with pytest.raises(OptionsError, match="found another call that writes to"):
            bj.from_beam(beam.Create(ELEMENTS[:3]), like=LIKE, folder=tmp_path)
        return element

    first = bj.from_beam(beam.Create(ELEMENTS[:2]) | beam.Map(second), like=LIKE, folder=tmp_path)
    assert sorted(members(first)["i"].tolist()) == [0, 1]


def test_texts_are_bytes_and_keys(tmp_path):
    words = ["Zürich", "", "Bern", "Zürich"]
    like = {"city": np.zeros(7, np.uint8), "x": np.float32(0)}
    rows = beam.Create([{"city": word, "x": i} for i, word in enumerate(words)])
    data = bj.from_beam(rows, like=like, folder=tmp_path / "d")
    fn = bj.program(placements={"rows": None})(
        lambda rows: bj.reduce_by_key(rows["x"], rows["city"])
    )
    found = bj.run(fn, data).to_arrow().to_pylist()
    assert found == [
        {"key": "", "value": 1},
        {"key": "Bern", "value": 2},
        {"key": "Zürich", "value": 3},
    ]
    like["city"] = np.zeros(6, np.uint8)
    with pytest.raises(StructureError, match=r"found a text of 7 bytes as leaf \['city'\]"):
        bj.from_beam(rows, like=like, folder=tmp_path / "e")


@pytest.mark.versions
def test_dtypes_that_files_do_not_know_and_keys(tmp_path):
    keys = jax.random.split(KEY, 5)
    values = np.arange(5).astype(ml_dtypes.bfloat16)
    elements = [(keys[i], values[i], i) for i in range(5)]
    data = bj.from_beam(
        lambda p: p | beam.Create(range(5)) | beam.Map(elements.__getitem__),
        like=(KEY, values[0], np.int64(0)),
        folder=tmp_path,
        index=operator.itemgetter(2),
    )
    assert data.leaves[0].key_impl
    assert_same_bits(data.read(0, 5)[:2], [np.asarray(jax.random.key_data(keys)), values])

    @bj.program(placements={"rows": None})
    def draws(rows):
        return bj.reduce_sum(
            bj.map_fn(lambda k, v, _: jax.random.uniform(k) * v.astype("float32"), rows)
        )

    assert_close(bj.run(draws, data), jax.jit(draws)((keys, values, np.arange(5))), 1e-6)
    like, other = (jax.random.key(0, impl=impl) for impl in ("rbg", "unsafe_rbg"))  # of one shape
    rows = lambda p: p | beam.Create([0]) | beam.Map(lambda _: other)
    with pytest.raises(StructureError, match=r"found key<urbg>\[\] as a member, expected .*rbg"):
        bj.from_beam(rows, like=like, folder=tmp_path / "keys")


# --- the folder stands for the data


def test_a_folder_with_members_is_refused_and_opened(tmp_path):
    """Never are the members of one pipeline returned for another."""
    first = bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path / "d")
    for rows in (beam.Create(ELEMENTS), beam.Create(ELEMENTS[:3])):
        with pytest.raises(OptionsError, match=r"of an earlier call.*open_placed\(folder\)"):
            bj.from_beam(rows, like=LIKE, folder=tmp_path / "d")
    expected = jax.tree.map(np.copy, members(first))
    folder = (tmp_path / "d").rename(tmp_path / "moved")
    assert_same_bits(members(bj.open_placed(folder)), expected)
    path = folder / "part-00000-leaf-001.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(SourceError, match=r"leaf-001.npy"):
        bj.open_placed(folder)
    path.unlink()
    with pytest.raises(SourceError, match=r"leaf-001.npy: cannot open"):
        bj.open_placed(folder)
    manifest = folder / "members.json"
    record = {**json.loads(manifest.read_text()), "parts": [[0, -1]]}
    for text in (json.dumps(record), "{", "[]", "[" * 10**5):
        manifest.write_text(text)
        with pytest.raises(ArrayFormatError, match=r"members\.json: found no list"):
            bj.open_placed(folder)


@pytest.mark.parametrize(
    "how", ["one", "threads", pytest.param("processes", marks=pytest.mark.long)]
)
def test_a_transform_of_the_user_that_fails_is_named(how, tmp_path, small):
    """And leaves nothing that the next call takes."""

    def divided(element):  # in here, so that processes get it by value
        return {**element, "i": 1 // (element["i"] - 80)}

    def runtime(element):
        raise RuntimeError("several\nlines")

    def failing_later(pipeline):
        rows = pipeline | beam.Create(ELEMENTS)
        return rows | "Divide" >> beam.Map(divided) | "Never" >> beam.Map(lambda row: row)

    cases = [
        (failing_later, "'Divide'", "ZeroDivisionError: "),
        (beam.Create(ELEMENTS) | beam.Map(divided), r"'.*Map\(divided\)'", "ZeroDivisionError: "),
        (beam.Create(ELEMENTS) | beam.Map(runtime), r"'.*Map\(runtime\)'", "(RuntimeError|lines)"),
    ]
    for rows, label, message in cases[:1] if how == "processes" else cases:
        match = f"^from_beam: the transform {label} failed: {message}"
        with pytest.raises(WorkerError, match=match) as caught:
            bj.from_beam(rows, like=LIKE, folder=tmp_path, options=RUNNERS[how])
        assert caught.value.__cause__ is not None
        if how != "processes":
            assert isinstance(caught.value.__cause__, (ZeroDivisionError, RuntimeError))
        assert not os.listdir(tmp_path)
    assert len(bj.from_beam(beam.Create(ELEMENTS), like=LIKE, folder=tmp_path)) == N


# --- what is refused


def test_elements_that_are_no_members(tmp_path):
    bad = (
        ({"x": X[0]}, r"found the element \{'x'.*expected the tree of `like`.*'i'"),
        ("text", r"found the element 'text', expected the tree"),
        ({"x": X[0][:2], "i": 1}, r"found float32\[2\] as leaf \['x'\], expected float32"),
        ({"x": X[0].astype(float), "i": 1}, r"found float64\[3\] as leaf \['x'\]"),
        ({"x": X[0], "i": 1.5}, r"found float 1.5 as leaf \['i'\], expected int32"),
        ({"x": X[0], "i": 2**31}, r"found int 2147483648 as leaf \['i'\], expected int32"),
        ({"x": [1, 2, "c"], "i": 1}, r"found <U21\[3\] as leaf \['x'\]"),
        ({"x": X[0], "i": "3"}, r"found str '3' as leaf \['i'\]"),
        ({"x": X[0], "i": None}, r"found NoneType None as leaf|expected the tree"),
        ({"x": [[1.0], [1.0, 2.0]], "i": 1}, r"found lists of unequal lengths"),
    )
    for case, (element, message) in enumerate(bad):
        rows = beam.Create([0, 1]) | beam.Map(lambda i, e=element: e if i else ELEMENTS[0])
        with pytest.raises(StructureError, match=f"from_beam: {message}"):
            bj.from_beam(rows, like=LIKE, folder=tmp_path / f"raises {case}")
    elements = [ELEMENTS[0], *(element for element, _ in bad)]
    rows = beam.Create(range(len(elements))) | beam.Map(lambda i: elements[i])
    letters = tmp_path / "dead.jsonl"
    options = {"on_error": "drop", "drop_limit": 0.95, "dead_letters": letters}
    data = bj.from_beam(rows, like=LIKE, folder=tmp_path / "d", options=options)
    assert len(data) == 1
    messages = [dropped.message for dropped in data.dropped]
    assert len(messages) == len(bad)
    for _, message in bad:
        assert any(re.search(f"StructureError: from_beam: {message}", m) for m in messages)
    lines = letters.read_text().splitlines()
    assert sorted(json.loads(line)["message"] for line in lines) == sorted(messages)
    assert bj.open_placed(tmp_path / "d").dropped == data.dropped
    options["drop_limit"] = 0.9
    with pytest.raises(WorkerError, match=r"10 of 11 members, and drop_limit=0\.9"):
        bj.from_beam(rows, like=LIKE, folder=tmp_path / "e", options=options)


def test_dropped_elements_leave_no_gap(tmp_path, small):
    rows = beam.Create(ELEMENTS) | beam.Map(lambda e: {**e, "x": None} if e["i"] % 30 == 7 else e)
    options = {"on_error": "drop"}
    data = bj.from_beam(rows, like=LIKE, folder=tmp_path, index=number, options=options)
    np.testing.assert_array_equal(members(data)["i"], [i for i in range(N) if i % 30 != 7])
    assert len(data.dropped) == 3
    beyond = lambda element: N if element["i"] == N - 1 else element["i"]
    with pytest.raises(SourceError, match=f"found an element with {N}"):
        bj.from_beam(rows, like=LIKE, folder=tmp_path / "b", index=beyond, options=options)


def test_numbers_that_are_no_permutation(tmp_path, small):
    for numbers, message in (
        ([0, 1, 1], r"3 members are numbered 0 to 2, each once; found 2 elements with 1"),
        ([0, 1, 3], r"each once; found no element with 2"),
        ([0, 5, 9], r"found no element with 1 \(and 1 more"),
        ([0, -1, 1], r"index returns -1, expected the number of the member"),
        ([0, 1.0, 2], r"index returns 1.0, expected"),
        ([0, True, 2], r"index returns True, expected"),
        ([0, 1, 2**70], r"index returns 1180591620717411303424, expected"),
        ([*range(40), *range(41, N + 1)], "found no element with 40"),
        ([*range(N - 1), 10**6], "no element with 89|an element with 1000000"),
        ([*range(N - 1), 17], "found 2 elements with 17|no element with 89"),
    ):
        rows = beam.Create(range(len(numbers))) | beam.Map(lambda i: {"x": X[0], "i": i})
        index = lambda element, numbers=numbers: numbers[element["i"]]
        with pytest.raises((SourceError, StructureError), match=message):
            bj.from_beam(rows, like=LIKE, folder=tmp_path, index=index)


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


def test_what_is_no_bounded_pcollection(tmp_path):
    stream = streams.TestStream().advance_watermark_to_infinity()
    own = beam.Pipeline() | beam.Create([1])
    windowed = lambda p: p | beam.Create([1]) | beam.WindowInto(beam.window.FixedWindows(5))
    for transform, message in (
        (stream, "found an unbounded PCollection"),
        (windowed, "the elements are in FixedWindows, expected the global window"),
        (own, r"found a PCollection.*beamjax.transform"),
        (lambda p: own, "the transform returns .*expected a PCollection of the pipeline"),
        (lambda p: [1], r"the transform returns \[1\], expected a PCollection"),
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
    for given in (own, beam.Create([1])):
        for call in (bj.run, bj.explain, bj.verify):
            with pytest.raises(StructureError, match=r"beamjax.from_beam\(.*beamjax.transform"):
                call(loss, W, KEY, given, bj.from_range(1))
