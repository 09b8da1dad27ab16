"""Placements whose number of members is found only while a pipeline runs."""

import os
import re
import tempfile

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.testing.util import assert_that
from test_transforms import members, pipeline

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StagingError, StructureError
from beamjax.pipelines.counting import joined

(UNKNOWN,) = jax.export.symbolic_shape("n")
W = np.asarray([0.5, -1.25, 2.0], np.float32)
RNG = np.random.default_rng(0)
OPTIONS = {"shard_size": 8}
opened = bj.program(placements={"clients": None})


def data(n):
    x = np.random.default_rng(n).normal(size=(n, 4, 3)).astype(np.float32)
    return {"x": x, "k": np.random.default_rng(n).integers(0, 3, size=n).astype(np.int32)}


def abstract(tree, n=UNKNOWN):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), tree)


def transform(fn, *args, tree=None, options=OPTIONS):
    return bj.transform(fn, *args, abstract(data(1) if tree is None else tree), options=options)


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path, monkeypatch):
    """Beam leaves a folder for each pipeline that is made and not run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def same(expected, exact, is_placed):
    """A check of a PCollection against an array: bit by bit, and as `jax.jit` gives it."""

    def check(found):
        if is_placed:
            assert sorted(i for i, _ in found) == list(range(len(expected)))
            found = [np.stack([x for _, x in sorted(found, key=lambda pair: pair[0])])]
        (array,) = found
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert exact is None or array.tobytes() == exact.tobytes()
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)

    return check


def raw(x):
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def check(fn, *args, tree, placed=(), options=OPTIONS, bits=True):
    """Runs `fn` over members of unknown number.

    The results are those of `jit`, and have the bits of `run` with the number known. They may not
    where that is a whole number of shards, as these need no mask then; nor where the program itself
    divides by the number: XLA multiplies by one over a constant.
    """
    if options is not None and len(jax.tree.leaves(tree)[0]) % options["shard_size"] == 0:
        bits = False
    expected = jax.tree.leaves(jax.jit(fn)(*args, tree))
    exact = jax.tree.leaves(bj.run(fn, *args, tree, runner="local", options=options))
    with pipeline() as p:
        results = p | beam.Create(members(tree)) | transform(fn, *args, tree=tree, options=options)
        for i, result in enumerate(jax.tree.leaves(results)):
            same_as = same(raw(expected[i]), raw(exact[i]) if bits else None, i in placed)
            assert_that(result, same_as, label=f"check {i}")


# --- what works


@opened
def reductions(w, d):
    y = bj.map_fn(lambda e: jnp.tanh(e["x"] @ w), d)
    return [
        *(f(y) for f in (bj.reduce_sum, bj.reduce_mean, bj.reduce_max, bj.reduce_min)),
        *(f(y > 0) for f in (bj.reduce_any, bj.reduce_all)),
        *(f(y) for f in (bj.reduce_prod, bj.reduce_argmax, bj.reduce_argmin)),
        bj.reduce_mean(d["k"]),
        bj.reduce_weighted_mean(y, d["k"] + 1),
        bj.reduce_by_key(y, d["k"], num_keys=3),
        bj.reduce(lambda a, b: a * 0.5 + b, y),
        jnp.sum(y, axis=(0, 1)),
        jnp.max(d["x"], axis=(0, 1)),
    ]


@pytest.mark.parametrize("n", [1, 7, 8, 20])
def test_reductions(n):
    check(reductions, W, tree=data(n))


@opened
def loss(w, d):
    errors = bj.map_fn(lambda e: jnp.sum(jnp.tanh(e["x"] @ w) - e["k"].astype("float32")) ** 2, d)
    return bj.reduce_mean(errors) + bj.reduce_max(errors)


@pytest.mark.parametrize("n", [1, 8, 20])
def test_gradients(n):
    check(jax.value_and_grad(loss), W, tree=data(n))


def test_the_gradient_of_a_mean_takes_no_further_pass():
    passes = [
        transform(jax.value_and_grad(loss), W).plan.passes(),
        bj.transform(jax.value_and_grad(loss), W, abstract(data(9), 9)).plan.passes(),
    ]
    assert passes[0] == passes[1]


@opened
def two_passes(w, d):
    y = bj.map_fn(lambda e: jnp.tanh(e["x"] @ w), d)
    mean = bj.reduce_mean(y)
    z = bj.map_fn(lambda e, v: jnp.sum(v - mean) * e["k"].astype("float32"), (d, y))
    return z, bj.reduce_max(z), y


@pytest.mark.parametrize("n", [1, 7, 8, 20])
def test_several_passes_and_placed_results(n):
    check(two_passes, W, tree=data(n), placed=(0, 2))


@opened
def numbers(w, d):
    """Reads the number of members as a value, on the server and in bodies."""
    n = d["x"].shape[0]
    scaled = bj.map_fn(lambda e: jax.jit(lambda v: v / n)(e["x"].sum()) + 2 * n, d)
    gradient = jax.grad(lambda v: bj.reduce_mean(bj.map_fn(lambda e: (e["x"] @ v).sum() / n, d)))
    return [
        bj.reduce_sum(scaled),
        gradient(w),
        jnp.float32(n) * w,
        1 / n + jnp.sqrt(jnp.float32(3 * n // 2)),
        d["x"].sum(0) / n,
        jnp.mean(d["x"], axis=(0, 2)),
        jnp.var(d["x"], axis=0),
        scaled,
    ]


@pytest.mark.parametrize("n", [1, 20])
def test_the_number_as_a_value(n):
    check(numbers, W, tree=data(n), placed=(7,), bits=False)


def test_the_number_as_a_result():
    prog = opened(lambda d: (jnp.int32(d["k"].shape[0]), jnp.max(d["k"])))
    check(prog, tree=data(20))


def test_nothing_but_the_number():
    check(opened(lambda d: jnp.float32(d["x"].shape[0]) / 3), tree=data(20), bits=False)
    check(opened(lambda d: bj.reduce_sum(bj.broadcast(W))), tree=data(20))


def test_compiled_and_nested_programs():
    @opened
    def outer(w, d):
        return jax.jit(loss)(w, d) + bj.reduce_mean(d["k"])

    check(jax.jit(outer), W, tree=data(20))


def test_symbols_of_one_name_are_the_same():
    tree = data(20)

    @opened
    def prog(x, k):
        return bj.reduce_sum(bj.map_fn(lambda x, k: x.sum() * k.astype("float32"), (x, k)))

    specs = []
    for array in (tree["x"], tree["k"]):
        (n,) = jax.export.symbolic_shape("n")
        specs.append(jax.ShapeDtypeStruct((n, *array.shape[1:]), array.dtype))
    expected = np.asarray(bj.run(prog, tree["x"], tree["k"], options=OPTIONS))
    with pipeline() as p:
        elements = p | beam.Create(members((tree["x"], tree["k"])))
        result = elements | bj.transform(prog, *specs, options=OPTIONS)
        assert_that(result, same(expected, expected, False))


@opened
def creations(key, d):
    n = d["k"].shape[0]
    keys = jax.random.split(key, n)
    noise = bj.map_fn(
        lambda k, i: jax.random.normal(k) * i.astype("float32"), (keys, jnp.arange(n))
    )
    shared = bj.broadcast(W)
    y = bj.map_fn(lambda e, w, s: (e["x"] @ w).sum() + s, (d, shared, noise))
    return bj.reduce_sum(y), jnp.zeros(n) + noise, bj.reduce_sum(jnp.ones(n))


@pytest.mark.parametrize("n", [7, 20])
def test_what_members_make_themselves(n):
    check(creations, jax.random.key(3), tree=data(n), placed=(1,))


def test_members_that_are_written_by_number():
    @opened
    def prog(i, d):
        x = d["x"].at[i].set(0).at[jnp.stack([i, i + 1]), 1].add(2)
        return bj.reduce_max(x.at[3].multiply(5)), x

    for index in (2, -1, 30):
        check(prog, jnp.int8(index), tree=data(20), placed=(1,))


def test_rounds():
    @opened
    def train(w, d):
        def round_(w, rate):
            value, gradient = jax.value_and_grad(loss)(w, d)
            return w - rate * gradient / d["k"].shape[0], value

        return jax.lax.scan(round_, w, jnp.asarray([0.1, 0.05]))

    check(train, W, tree=data(20), bits=False)


def test_a_loop_on_each_member():
    @opened
    def prog(d):
        def round_(i, x):
            return x * 0.5 + i

        return bj.reduce_sum(jax.lax.fori_loop(0, 3, round_, d["x"]))

    check(prog, tree=data(20))


def test_several_placements_of_which_one_is_known():
    rows = RNG.normal(size=(5, 3)).astype(np.float32)

    @bj.program(placements={"clients": None, "rows": 5})
    def prog(rows, d):
        n = d["k"].shape[0]
        sines = bj.map_fn(lambda row: jnp.sin(row) / n, rows, placement="rows")
        w = bj.reduce_mean(sines, placement="rows")
        y = bj.map_fn(lambda e: e["x"] @ w, d, placement="clients")
        return bj.reduce_mean(y, placement="clients")

    check(prog, rows, tree=data(20), bits=False)
    check(lambda d: prog(rows, d), tree=data(20), bits=False)


def test_shards_of_the_size_that_suits_a_member():
    tree = {"x": data(100)["x"]}
    prog = opened(lambda d: bj.reduce_max(d["x"]))
    assert transform(prog, tree=tree, options=None).plan.shard_sizes["clients"] == 4096
    check(prog, tree=tree, options=None)


def test_a_decorator_with_the_same_symbol():
    prog = bj.program(clients=UNKNOWN)(lambda d: bj.reduce_mean(d["x"]))
    tree = data(20)
    expected = np.asarray(bj.run(opened(lambda d: bj.reduce_mean(d["x"])), tree, options=OPTIONS))
    with pipeline() as p:
        result = p | beam.Create(members(tree)) | transform(prog, tree=tree)
        assert_that(result, same(expected, expected, False))


def test_several_workers():
    tree = data(20)
    flags = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
    expected = np.asarray(bj.run(jax.grad(loss), W, tree, options=OPTIONS))
    with pipeline(*flags) as p:
        result = p | beam.Create(members(tree)) | transform(jax.grad(loss), W, tree=tree)
        assert_that(result, same(expected, expected, False))


def test_big_reductions_in_pieces(monkeypatch):
    monkeypatch.setattr("beamjax.lane_pieces.PIECE_VALUES", 5)
    check(opened(lambda d: bj.reduce_mean(d["x"])), tree=data(20))


@opened
def with_callbacks(w, d):
    def total(x):
        return jax.pure_callback(
            host_sum, jax.ShapeDtypeStruct((), "float32"), x, vmap_method="sequential"
        )

    n = d["k"].shape[0]
    return bj.reduce_mean(bj.map_fn(lambda e: total(e["x"] @ w) / n, d))


def host_sum(x):
    return np.sum(x, dtype=np.float32)


@pytest.mark.parametrize("running", ["in_memory", "multi_processing"])
def test_calls_to_the_host(running, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # so that workers find `host_sum`
    tree = data(20)
    flags = [f"--direct_running_mode={running}", "--direct_num_workers=2"]
    expected = np.asarray(jax.jit(with_callbacks)(W, tree))
    with pipeline(*flags) as p:
        result = p | beam.Create(members(tree)) | transform(with_callbacks, W, tree=tree)
        assert_that(result, same(expected, None, False))


@pytest.mark.parametrize("fn", [loss, numbers, two_passes])
def test_wide_types(fn):
    with jax.enable_x64(True):
        placed = {loss: (), numbers: (7,), two_passes: (0, 2)}[fn]
        check(fn, W, tree=data(20), placed=placed, bits=fn is not numbers)


def test_explanations_count_bytes_by_member():
    explanation = bj.explain(numbers, W, abstract(data(1)), options=OPTIONS)
    text = str(explanation)
    assert "clients: n members in shards of 8" in text
    assert re.search(r"args\[1\]\['x'\] .* n x 48 B ", text)
    assert re.search(r"number of clients +-> +server_0 +size@clients", text)
    assert "read by all passes     n x 96 B" in text
    assert explanation.to_json()["placements"][0]["members"] is None
    assert explanation.to_json()["read_bytes"] == {"each": 96, "fixed": 0}
    assert "n x 48 B" in explanation.to_mermaid()
    for stage in ("staged", "flat", "placed", "graph"):
        assert str(bj.explain(numbers, W, abstract(data(1)), stage=stage))


# --- what is not right in the PCollection


def failing(elements, fn=two_passes):
    with pytest.raises(bj.BeamjaxError) as caught, pipeline() as p:
        p | beam.Create(elements) | transform(fn, *([W] if fn is two_passes else []))
    return caught


@pytest.mark.parametrize("lost", [0, 3, 7, 8, 18])
def test_missing_members(lost):
    elements = [pair for pair in members(data(20)) if pair[0] != lost]
    caught = failing(elements)
    assert caught.type is SourceError
    assert re.search(rf"1 members .*missing.*first one is member {lost}\b", str(caught.value))


def test_a_missing_shard():
    elements = [pair for pair in members(data(40)) if not 16 <= pair[0] < 32]
    message = str(failing(elements).value)
    assert re.search("16 members are missing.* member 16;", message)
    message = str(failing([pair for pair in members(data(40)) if pair[0] >= 8]).value)
    assert re.search("8 members are missing.* member 0;", message)


def test_only_placed_results_are_checked_too():
    elements = [pair for pair in members(data(20)) if pair[0] != 15]
    caught = failing(elements, opened(lambda d: bj.map_fn(jnp.sin, d["x"])))
    assert "first one is member 15" in str(caught.value)


def test_a_member_twice():
    elements = members(data(20))
    assert re.search("member 13 is in .* twice", str(failing([*elements, elements[[
        i for i, _ in elements].index(13)]]).value))  # fmt: skip


def test_no_members():
    caught = failing([])
    assert caught.type is SourceError
    assert "PCollection is empty" in str(caught.value)


@pytest.mark.parametrize("index", [-1, 2**31 - 1])
def test_an_index_out_of_range(index):
    elements = [*members(data(3)), (index, members(data(1))[0][1])]
    assert f"found member {index}, expected 0 to" in str(failing(elements).value)


def test_joined_ranges():
    assert joined([]) == []
    assert joined([(8, 16), (0, 8), (24, 30)]) == [(0, 16), (24, 30)]
    assert joined([(0, 8), (0, 8), (16, 17), (3, 9)]) == [(0, 9), (16, 17)]


# --- what needs the number as a constant

X = data(1)["x"]
HERE = re.escape(__file__)


def branches(x):
    return bj.reduce_sum(x) if x.shape[0] > 3 else bj.reduce_max(x)


def python_loop(x):
    return sum(bj.reduce_sum(x) * i for i in range(x.shape[0]))


def numpy_array(x):
    return bj.reduce_sum(bj.map_fn(jnp.sum, x) * np.zeros(x.shape[0]))


def of_float(x):
    return bj.reduce_sum(x) / float(x.shape[0])


def first(x):
    return x[0]


def last(x):
    return x[-1]


def few(x):
    return x[:2]


def clipped(x):
    return bj.reduce_sum(x.at[2].set(0, mode="clip"))


def updated(x):
    return bj.reduce_sum(jax.lax.dynamic_update_index_in_dim(x, W[0] * x.sum(0), 2, 0))


def in_order(x):
    return jnp.sort(x, axis=0)


def flat(x):
    return bj.reduce_sum(x) + jnp.sort(x.reshape(-1))[0]


def gram(x):
    return jnp.einsum("iab,jab->ij", x, x)


def pairs(x):
    return bj.reduce_sum(bj.map_fn(lambda v: (v[None] - x).sum(), x))


def cumulated(x):
    return bj.reduce_sum(jnp.cumsum(x, axis=0))


def whole(x):
    return jnp.arange(x.shape[0]), bj.reduce_sum(x)


def scan_over_members(x):
    return jax.lax.scan(lambda c, v: (c * 0.5 + v, None), jnp.zeros((4, 3)), x)[0]


def loop_in_body(x):
    n = x.shape[0]
    return bj.reduce_sum(bj.map_fn(lambda v: jax.lax.fori_loop(0, 2, lambda i, a: a / n, v), x))


def scattered(x):
    return bj.reduce_sum(bj.map_fn(lambda v, i: v * i, (x, jnp.cumsum(jnp.ones(x.shape[0])))))


NEEDING = [
    branches, python_loop, numpy_array, of_float, first, last, few, clipped, updated, in_order,
    flat, gram, pairs, cumulated, whole, scan_over_members, loop_in_body, scattered,
]  # fmt: skip


@pytest.mark.parametrize("fn", NEEDING, ids=lambda fn: fn.__name__)
def test_refusals_say_where_and_what_to_do(fn):
    prog = opened(fn)
    with pytest.raises(StagingError) as caught:
        transform(prog, tree=X)
    message = str(caught.value)
    line = fn.__code__.co_firstlineno
    assert re.match(rf"{HERE}:({line + 1}|{line + 2}) \(", message), message
    assert "found only while the program runs" in message
    assert "Give the number of members in the decorator" in message
    # The same program with a known number is planned.
    bj.transform(prog, abstract(X, 9))


def test_errors_of_the_user_are_as_they_are():
    def wrong(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transform(opened(wrong), tree=X)
    with pytest.raises(ValueError, match="shapes"):
        transform(opened(lambda x: bj.reduce_sum(x) + jnp.ones(7)), tree=X)


def test_shapes():
    (m,) = jax.export.symbolic_shape("m")
    for shape in [(3, UNKNOWN), (UNKNOWN, m), (2 * UNKNOWN, 3)]:
        with pytest.raises(StructureError, match=r"args\[0\].*the first dimension"):
            bj.transform(opened(bj.reduce_sum), jax.ShapeDtypeStruct(shape, "float32"))


def test_constraints_that_nothing_would_check():
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 1"])
    bj.transform(opened(bj.reduce_sum), jax.ShapeDtypeStruct((n, 3), "float32"))
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 8"])
    with pytest.raises(StructureError, match=r"the constraints \['n >= 8'\], expected none"):
        bj.transform(opened(bj.reduce_sum), jax.ShapeDtypeStruct((n, 3), "float32"))


def test_placements_that_do_not_fit():
    spec = jax.ShapeDtypeStruct((UNKNOWN, 3), "float32")
    with pytest.raises(PlacementError, match="expected"):
        bj.transform(bj.program(clients=5)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x))), spec)
    with pytest.raises(PlacementError, match="it has n members"):
        bj.transform(bj.program(clients=5)(lambda x: jnp.float32(3)), spec)


def test_a_placement_without_members_in_the_pcollection():
    @bj.program(placements={"clients": UNKNOWN, "others": UNKNOWN})
    def prog(x):
        y = bj.reduce_sum(bj.broadcast(W, placement="others"), placement="others")
        return y + bj.reduce_sum(x, placement="clients").sum()

    with pytest.raises(StagingError, match="'others' is unknown"), pipeline() as p:
        p | beam.Create(members(X)) | transform(prog, tree=X)


def test_run_takes_no_unknown_sizes():
    with pytest.raises(StagingError, match="expected an array or a source"):
        bj.run(opened(bj.reduce_sum), jax.ShapeDtypeStruct((UNKNOWN, 3), "float32"))
