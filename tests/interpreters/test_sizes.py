"""Sizes of placements that come from the arguments of each call."""

import functools

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.testing.util import assert_that

import beamjax as bj

X = jnp.arange(10.0).reshape(5, 2)
W = jnp.asarray([1.0, 2.0, 3.0])
opened = bj.program(placements={"clients": None})


@opened
def total(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v, b: v.sum() * b.sum(), (x, bj.broadcast(w))))


@pytest.mark.versions
def test_the_size_is_that_of_the_arguments():
    mean = bj.program(clients=None)(lambda x: bj.reduce_mean(x))
    for x, expected in ((X, [4.0, 5.0]), (X[:2], [1.0, 2.0]), (jnp.ones((1, 2)), [1.0, 1.0])):
        np.testing.assert_array_equal(mean(x), expected)
    # Of several lengths, the only one with which the program can run.
    assert (total(W, X), total(W, X[:4])) == (270.0, 168.0)
    with jax.checking_leaks():
        assert jax.jit(total)(W, X) == 270.0
    fixed, ws = bj.program(clients=5)(total.__wrapped__), jnp.stack([W, W])
    batched = lambda f: jax.vmap(f, (0, None))
    for transform, w in ((jax.grad, W), (batched, ws), (jax.hessian, ws)):
        np.testing.assert_allclose(transform(total)(w, X), transform(fixed)(w, X), rtol=1e-6)
    placed = str(bj.explain(total, W, X, stage="placed"))
    assert "clients along axis 0" in placed
    assert "clients[" not in placed


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_plans_for_several_sizes(runner):
    for n in (3, 20, 9):
        x = np.ones((n, 2), np.float32)
        for given in (x, bj.from_arrays(x)):
            assert bj.run(total, jnp.ones(2), given, runner=runner) == 4 * n


def test_several_placements_and_programs_inside_of_programs():
    @bj.program(placements={"a": None, "b": 2})
    def prog(x, y):
        return bj.reduce_sum(x, placement="a") + bj.reduce_sum(y, placement="b")

    np.testing.assert_array_equal(prog(X, jnp.ones((2, 2))), [22.0, 27.0])
    inner = opened(lambda w: bj.reduce_sum(bj.broadcast(w)))
    outer = bj.program(clients=4)(lambda w: inner(w))  # It takes the size around it,
    np.testing.assert_array_equal(outer(W), 4 * W)
    inner = bj.program(clients="x")(lambda x: bj.reduce_sum(x))  # unless it names a parameter.
    outer = bj.program(clients=4)(lambda x: inner(x) + bj.reduce_sum(bj.broadcast(1.0)))
    np.testing.assert_array_equal(outer(X), [24.0, 29.0])


def test_sizes_that_arguments_do_not_give():
    count = opened(lambda x, y: bj.reduce_sum(bj.broadcast(1.0)))
    cases = [
        (r"found no single size for the placement 'clients'.*no argument is an array",
         opened(lambda: bj.broadcast(1.0)), ()),
        (r"have the lengths \[5, 3\], and no operator .*placements=\{'clients': PARAMETER\}",
         count, (X, W)),
        (r"x\[1\] has shape \(3,\), expected \(5, ...\)",
         opened(lambda x, y: bj.reduce_sum((x, y))), (X, W)),
    ]  # fmt: skip
    for message, prog, args in cases:
        with pytest.raises(bj.PlacementError, match=message):
            prog(*args)


# --- how often a program is traced, and what of its errors


def layered(placements, calls):
    """A program of two layers, each with weights of another shape, that counts its traces."""

    @bj.program(placements=placements)
    def prog(params, x, y):
        calls.append("program")

        def body(v):
            calls.append("body")
            for w, b in params:
                v = jnp.tanh(v[: w.shape[0]] @ w + b)[0] * jnp.ones(w.shape[1] + 1)
            return v.sum()

        out = bj.reduce_mean(bj.map_fn(body, x, placement="a"), placement="a")
        if "b" not in placements:
            return out
        shifted = bj.map_fn(lambda v: v.sum() + out, y, placement="b")
        return bj.reduce_mean(shifted, placement="b")

    return prog


def test_a_program_is_traced_a_constant_number_of_times():
    """Once, and once up to the first use of each size that the arguments leave open."""
    params = [(np.ones((2 + i, 3 + i), "float32"), np.ones(3 + i, "float32")) for i in range(2)]
    args = params, np.ones((50, 2), "float32"), np.ones((60, 2), "float32")
    ways = {
        "call": lambda fn: fn(*args),
        "jit": lambda fn: jax.jit(fn)(*args),
        "grad": lambda fn: jax.grad(fn)(*args),
        "run": lambda fn: bj.run(fn, *args, runner="local"),
        "run of grad": lambda fn: bj.run(jax.grad(fn), *args, runner="local"),
        "explain": lambda fn: bj.explain(fn, *args),
    }
    cases = {  # placements: traces of the program, and of the body of its first map
        (50,): (1, 1),
        ("x",): (1, 1),
        (None,): (2, 1),
        (50, 60): (1, 1),
        ("x", "y"): (1, 1),
        (None, "y"): (2, 1),
        (None, None): (3, 2),
    }
    wrong = []
    for sizes, expected in cases.items():
        for way, call in ways.items():
            calls = []
            call(layered(dict(zip("ab", sizes, strict=False)), calls))
            found = calls.count("program"), calls.count("body")
            if found != expected:
                wrong.append((sizes, way, found, expected))
    assert not wrong


def test_errors_of_a_program_are_its_own():
    """Of any kind, from any line, with the user's frames."""

    def typo_in_body(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: v * no_such_name, x))  # noqa: F821

    def typo_after_broadcast(w, x):
        b = bj.broadcast(w)
        return bj.reduce_sum(bj.map_fn(lambda v, b: v * b.no_such_attribute, (x, b)))

    def typo_before(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: v * {"a": w}["b"], x))

    def shapes(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: v @ w, x))

    kinds = {typo_in_body: NameError, typo_after_broadcast: AttributeError,
             typo_before: KeyError, shapes: TypeError}  # fmt: skip
    for fn, kind in kinds.items():
        for way in (lambda f: f(W, X), lambda f: bj.run(f, W, X, runner="local")):
            with pytest.raises(kind) as caught:
                way(opened(fn))
            assert not isinstance(caught.value, bj.BeamjaxError)
            assert not isinstance(caught.value.__cause__, bj.BeamjaxError)
            assert any(entry.path.samefile(__file__) for entry in caught.traceback[1:])
            assert fn.__name__ in [entry.name for entry in caught.traceback]


def test_members_that_are_mixed_with_a_broadcast_before_any_operator_takes_them():
    def mixed(w, x):
        return bj.reduce_sum(bj.broadcast(w) * x[:, 0, None])

    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        opened(mixed)(W, X)
    notes = "".join(caught.value.__notes__)
    assert "looked for the number of members of 'clients'" in notes
    assert "placements={'clients': PARAMETER} makes this trace needless" in notes
    np.testing.assert_array_equal(bj.program(clients="x")(mixed)(W, X), 20 * W)


# --- a parameter that has the members


@bj.program(placements={"clients": "x"})
def named(w, x):
    centered = bj.broadcast(w) - x["a"][:, :1]
    return bj.reduce_mean(bj.map_fn(lambda v, b: jnp.sin(v["a"]).sum() * b, (x, centered))).sum()


def test_a_named_parameter_has_the_members():
    x = {"a": np.arange(10, dtype=np.float32).reshape(5, 2), "b": np.ones(5, np.int32)}
    w = np.asarray([1, 2, 3], np.float32)
    fixed = bj.program(clients=5)(named.__wrapped__)
    ways = {
        "call": lambda f: f(w, x),
        "keywords": lambda f: f(x=x, w=w),
        "jit": lambda f: jax.jit(f)(w, x),
        "grad": lambda f: jax.grad(f)(w, x),
        "vmap of w": lambda f: jax.vmap(f, (0, None))(np.stack([w, 2 * w]), x),
        "vmap of x": lambda f: jax.vmap(f, (None, 1))(w, {"a": np.stack([x["a"]] * 3, 1),
                                                          "b": np.stack([x["b"]] * 3, 1)}),
        "hessian": lambda f: jax.hessian(f)(w, x),
        "scan": lambda f: jax.lax.scan(lambda c, _: (f(c, x) * w, None), w, length=2)[0],
        "local": lambda f: bj.run(f, w, x, runner="local"),
        "run": lambda f: bj.run(f, w, x),
        "source": lambda f: bj.run(f, w, bj.from_arrays(x), runner="local"),
        "stream": lambda f: bj.run(f, w, bj.from_chunks(lambda: [x]), runner="local"),
        "run of grad": lambda f: bj.run(jax.grad(f), w, x, runner="local"),
        "run of vmap": lambda f: bj.run(jax.vmap(f, (0, None)), np.stack([w, w]), x),
        "partial": lambda f: bj.run(functools.partial(f, w), x, runner="local"),
    }  # fmt: skip
    wrong = []
    for way, call in ways.items():
        found, expected = call(named), call(fixed)
        if np.asarray(found).tobytes() != np.asarray(expected).tobytes():
            wrong.append((way, found, expected))
        if found.dtype != np.float32:
            wrong.append((way, found.dtype))
    assert not wrong
    assert bj.verify(named, w, x, runner="local").ok
    assert "clients: 5 members" in str(bj.explain(named, w, x))


def test_a_named_parameter_in_a_pipeline_of_unknown_length():
    (n,) = jax.export.symbolic_shape("n")
    mean = bj.program(clients="x")(lambda x, scale=2.0: bj.reduce_mean(x) * scale)
    transform = bj.transform(mean, jax.ShapeDtypeStruct((n, 2), "float32"))
    with beam.Pipeline(runner="FnApiRunner") as p:
        found = p | beam.Create(list(enumerate(np.asarray(X)))) | transform
        assert_that(found, lambda values: np.testing.assert_array_equal(values[0], [8.0, 10.0]))


def test_named_parameters_that_are_wrong():
    def total(w, x):
        return bj.reduce_sum(x)

    with pytest.raises(bj.PlacementError, match=r"of total\(w, x\); did you mean 'x'\?"):
        bj.program(placements={"clients": "xs"})(total)
    with pytest.raises(bj.PlacementError, match="'clients' has the size 'data', expected the name"):
        bj.program(placements={"clients": "data"})(total)
    prog = bj.program(clients="x")(total)
    cases = {
        r"x\['a'\] has shape \(5, 2\) and x\['b'\] has shape \(3,\)": {"a": X, "b": W},
        r"x\['b'\] has shape \(\), expected an array": {"a": X, "b": jnp.float32(1)},
        r"x\[0\] has shape \(\), expected an array.*numpy\.asarray": [1.0, 2.0],
        r"x has no leaves": None,
    }
    for message, x in cases.items():
        with pytest.raises(bj.PlacementError, match=f"program total: {message}"):
            prog(W, x)
    with pytest.raises(TypeError, match=r"total\(\) missing a required argument: 'x'"):
        prog(W)
