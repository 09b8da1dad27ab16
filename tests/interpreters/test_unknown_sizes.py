"""Placements whose number of members is found only while a pipeline runs."""

import re
import tempfile
from pathlib import Path

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.testing.util import assert_that
from helpers import assert_close, raw
from streams import W, creations, data, opened, reductions, two_passes

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StagingError, StructureError

(UNKNOWN,) = jax.export.symbolic_shape("n")
OPTIONS = {"shard_size": 8}


def members(tree):
    """The elements of a PCollection, in no order."""
    n = len(jax.tree.leaves(tree)[0])
    order = np.random.default_rng(0).permutation(n).tolist()
    return [(i, jax.tree.map(lambda x, i=i: np.asarray(x[i]), tree)) for i in order]


def pipeline(*flags):
    return beam.Pipeline(runner="FnApiRunner", argv=list(flags))


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
        assert exact is None or array.tobytes() == exact.tobytes()
        assert_close(array, expected, rtol=1e-5, atol=1e-6)

    return check


def check(*cases, tree, options=OPTIONS, flags=()):
    """Runs programs over members of unknown number, all in one pipeline.

    A case is a function, its arguments, which results are placed, and whether bits are compared.
    The results are those of `jit`, and have the bits of `run` with the number known. They may not
    where that is a whole number of shards, as these need no mask then; nor where the program itself
    divides by the number: XLA multiplies by one over a constant.
    """
    whole = options is not None and len(jax.tree.leaves(tree)[0]) % options["shard_size"] == 0
    checks, tagged = {}, []
    with pipeline(*flags) as p:
        elements = p | beam.Create(members(tree))
        for number, (fn, args, placed, bits) in enumerate(cases):
            expected = jax.tree.leaves(jax.jit(fn)(*args, tree))
            exact = jax.tree.leaves(bj.run(fn, *args, tree, runner="local", options=options))
            results = elements | f"{number}" >> transform(fn, *args, tree=tree, options=options)
            for i, result in enumerate(jax.tree.leaves(results)):
                exactly = raw(exact[i]) if bits and not whole else None
                checks[number, i] = same(raw(expected[i]), exactly, i in placed)
                tag = beam.Map(lambda value, tag: (tag, value), (number, i))
                tagged.append(result | f"tag {number} {i}" >> tag)

        def check_all(found):
            for tag, check in checks.items():
                check([value for key, value in found if key == tag])

        assert_that(tagged | beam.Flatten(), check_all)


# --- what works


@opened
def loss(w, d):
    errors = bj.map_fn(lambda e: jnp.sum(jnp.tanh(e["x"] @ w) - e["k"].astype("float32")) ** 2, d)
    return bj.reduce_mean(errors) + bj.reduce_max(errors)


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
        jnp.int32(n),
    ]


@opened
def written(i, d):
    x = d["x"].at[i].set(0).at[jnp.stack([i, i + 1]), 1].add(2)
    return bj.reduce_max(x.at[3].multiply(5)), x


@opened
def trained(w, d):
    def one(w, rate):
        value, gradient = jax.value_and_grad(loss)(w, d)
        return w - rate * gradient / d["k"].shape[0], value

    return jax.lax.scan(one, w, jnp.asarray([0.1, 0.05]))


@opened
def looped(d):
    return bj.reduce_sum(jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, d["x"]))


@opened
def nested(w, d):
    return jax.jit(loss)(w, d) + bj.reduce_mean(d["k"])


@opened
def only_the_number(d):
    return jnp.float32(d["x"].shape[0]) / 3, jnp.int32(d["k"].shape[0]), jnp.max(d["k"])


@bj.program(placements={"clients": None, "rows": 5})
def two_placements(rows, d):
    n = d["k"].shape[0]
    sines = bj.map_fn(lambda row: jnp.sin(row) / n, rows, placement="rows")
    w = bj.reduce_mean(sines, placement="rows")
    return bj.reduce_mean(
        bj.map_fn(lambda e: e["x"] @ w, d, placement="clients"), placement="clients"
    )


ROWS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
ANY_NUMBER = [
    (reductions, (W,), (), True),
    (jax.value_and_grad(loss), (W,), (), True),
    (two_passes, (W,), (0, 2), True),
    (numbers, (W,), (7,), False),
    (creations, (W,), (1,), True),
]
MORE = [
    *((written, (jnp.int8(i),), (1,), True) for i in (2, -1, 30)),
    (trained, (W,), (), False),
    (looped, (), (), True),
    (jax.jit(nested), (W,), (), True),
    (only_the_number, (), (), False),
    (opened(lambda d: bj.reduce_sum(bj.broadcast(W))), (), (), True),
    (two_placements, (ROWS,), (), False),
    (lambda d: two_placements(ROWS, d), (), (), False),
]


@pytest.mark.parametrize("n", [1, pytest.param(7, marks=pytest.mark.long), 8, 20])
def test_any_number_of_members(n):
    check(*ANY_NUMBER, tree=data(n))


def test_more_programs():
    check(*MORE, tree=data(20))


def test_the_gradient_of_a_mean_takes_no_further_pass():
    plans = (
        transform(jax.value_and_grad(loss), W).plan,
        bj.transform(jax.value_and_grad(loss), W, abstract(data(9), 9)).plan,
    )
    assert plans[0].passes() == plans[1].passes()


def test_symbols_of_one_name_are_the_same():
    def of(x, k):
        return bj.reduce_sum(bj.map_fn(lambda x, k: x.sum() * k.astype("float32"), (x, k)))

    tree, specs = data(20), []
    for array in (tree["x"], tree["k"]):
        (n,) = jax.export.symbolic_shape("n")
        specs.append(jax.ShapeDtypeStruct((n, *array.shape[1:]), array.dtype))
    args = tree["x"], tree["k"]
    expected = np.asarray(bj.run(opened(of), *args, runner="local", options=OPTIONS))
    with pipeline() as p:
        elements = p | beam.Create(members(args))
        symbol = bj.program(clients=UNKNOWN)(of), abstract(args)
        for name, (prog, types) in {"open": (opened(of), specs), "symbol": symbol}.items():
            result = elements | name >> bj.transform(prog, *types, options=OPTIONS)
            assert_that(result, same(expected, expected, False), label=f"check {name}")


def test_shards_of_the_size_that_suits_a_member():
    tree = {"x": data(100)["x"]}
    prog = opened(lambda d: bj.reduce_max(d["x"]))
    assert transform(prog, tree=tree, options=None).plan.shard_sizes["clients"] == 4096
    check((prog, (), (), True), tree=tree, options=None)


def test_big_reductions_in_pieces_on_several_workers(monkeypatch):
    monkeypatch.setattr("beamjax.plan.steps.RANGE_VALUES", 5)
    flags = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
    mean = opened(lambda d: bj.reduce_mean(d["x"]))
    check((mean, (), (), True), (jax.grad(loss), (W,), (), True), tree=data(20), flags=flags)


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


PROCESSES = pytest.param("multi_processing", marks=pytest.mark.long)


@pytest.mark.parametrize("running", ["in_memory", PROCESSES])
def test_calls_to_the_host(running, monkeypatch):
    # Workers import `host_sum` from here.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    flags = [f"--direct_running_mode={running}", "--direct_num_workers=2"]
    check((with_callbacks, (W,), (), False), tree=data(20), flags=flags)


def test_wide_types():
    with jax.enable_x64(True):
        check((loss, (W,), (), True), *ANY_NUMBER[2:4], tree=data(20))


def test_explanations_count_bytes_by_member():
    explanation = bj.explain(numbers, W, abstract(data(1)), options=OPTIONS)
    text = str(explanation)
    assert "clients: n members in shards of 8" in text
    assert re.search(r" d\['x'\] .* n x 48 B ", text)
    assert re.search(r"server_0: Server\n +reads +size@clients ", text)
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


def test_missing_members():
    """A member, a shard, the first shard; found also where all results are placed."""
    cases = [(20, lambda i, lost=lost: i != lost, 1, lost) for lost in (0, 3, 7, 8, 18)]
    cases += [(40, lambda i: not 16 <= i < 32, 16, 16), (40, lambda i: i >= 8, 8, 0)]
    for n, is_there, count, first in cases:
        caught = failing([pair for pair in members(data(n)) if is_there(pair[0])])
        assert caught.type is SourceError
        pattern = rf"{count} members .*missing.* member {first}\b"
        assert re.search(pattern, str(caught.value)), (n, count, first)
    elements = [pair for pair in members(data(20)) if pair[0] != 15]
    caught = failing(elements, opened(lambda d: bj.map_fn(jnp.sin, d["x"])))
    assert "first one is member 15" in str(caught.value)


def test_members_that_should_not_be_there():
    elements = members(data(20))
    (again,) = [pair for pair in elements if pair[0] == 13]
    assert re.search("member 13 is in .* twice", str(failing([*elements, again]).value))
    for index in (-1, 2**31 - 1):
        more = [*members(data(3)), (index, members(data(1))[0][1])]
        assert f"found member {index}, expected 0 to" in str(failing(more).value)
    caught = failing([])
    assert caught.type is SourceError
    assert "PCollection is empty" in str(caught.value)


# --- what needs the number as a constant

X = data(1)["x"]
HERE = re.escape(__file__)


def branches(x):
    return bj.reduce_sum(x) if x.shape[0] > 3 else bj.reduce_max(x)


NEEDING = {
    "branches": branches,
    "python loop": lambda x: sum(bj.reduce_sum(x) * i for i in range(x.shape[0])),
    "numpy array": lambda x: bj.reduce_sum(bj.map_fn(jnp.sum, x) * np.zeros(x.shape[0])),
    "float": lambda x: bj.reduce_sum(x) / float(x.shape[0]),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "few": lambda x: x[:2],
    "clipped": lambda x: bj.reduce_sum(x.at[2].set(0, mode="clip")),
    "updated": lambda x: jax.lax.dynamic_update_index_in_dim(x, x.sum(0), 2, 0),
    "in order": lambda x: jnp.sort(x, axis=0),
    "flat": lambda x: bj.reduce_sum(x) + jnp.sort(x.reshape(-1))[0],
    "gram": lambda x: jnp.einsum("iab,jab->ij", x, x),
    "pairs": lambda x: bj.map_fn(lambda v: (v[None] - x).sum(), x),
    "neighbours": lambda x: bj.neighbours(x, before=1),
    "cumulated": lambda x: bj.reduce_sum(jnp.cumsum(x, axis=0)),
    "whole": lambda x: (jnp.arange(x.shape[0]), bj.reduce_sum(x)),
    "scan over members": lambda x: jax.lax.scan(lambda c, v: (c * 0.5 + v, None), x[0] * 0, x)[0],
    "loop in a body": lambda x: bj.map_fn(
        lambda v: jax.lax.fori_loop(0, 2, lambda i, a: a / x.shape[0], v), x),
    "scattered": lambda x: bj.map_fn(jnp.multiply, (x, jnp.cumsum(jnp.ones(x.shape[0])))),
}  # fmt: skip


@pytest.mark.parametrize("fn", NEEDING.values(), ids=list(NEEDING))
def test_refusals_say_where_and_what_to_do(fn):
    prog = opened(fn)
    with pytest.raises(StagingError) as caught:
        transform(prog, tree=X)
    message = str(caught.value)
    line = fn.__code__.co_firstlineno
    assert re.match(rf"{HERE}:({line}|{line + 1}) \(", message), message
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


def test_specifications_that_do_not_fit():
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    (m,) = jax.export.symbolic_shape("m")
    for shape in [(3, UNKNOWN), (UNKNOWN, m), (2 * UNKNOWN, 3)]:
        with pytest.raises(StructureError, match=r": found .*the first dimension"):
            bj.transform(opened(bj.reduce_sum), spec(*shape))
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 1"])
    bj.transform(opened(bj.reduce_sum), spec(n, 3))
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 8"])
    with pytest.raises(StructureError, match=r"the constraints \['n >= 8'\], expected none"):
        bj.transform(opened(bj.reduce_sum), spec(n, 3))
    five = bj.program(clients=5)
    with pytest.raises(PlacementError, match="expected"):
        bj.transform(five(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x))), spec(UNKNOWN, 3))
    with pytest.raises(PlacementError, match="it has n members"):
        bj.transform(five(lambda x: jnp.float32(3)), spec(UNKNOWN, 3))
    with pytest.raises(StagingError, match="expected an array or a source"):
        bj.run(opened(bj.reduce_sum), spec(UNKNOWN, 3))


def test_a_placement_without_members_in_the_pcollection():
    @bj.program(placements={"clients": UNKNOWN, "others": UNKNOWN})
    def prog(x):
        y = bj.reduce_sum(bj.broadcast(W, placement="others"), placement="others")
        return y + bj.reduce_sum(x, placement="clients").sum()

    with pytest.raises(StagingError, match="'others' is unknown"), pipeline() as p:
        p | beam.Create(members(X)) | transform(prog, tree=X)
