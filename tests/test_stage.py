"""From a function and arguments to a jaxpr with names for its inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import StructureError
from beamjax.interpreters.stage import flatten_arguments, stage
from beamjax.leaves import name_of


def paths(*args):
    return [(a.path, a.aval.shape, str(a.aval.dtype)) for a in flatten_arguments(args)[0]]


def test_paths_and_types_of_arguments():
    args = ({"w": np.ones((2, 3), "float32"), "b": 1.0}, [jnp.arange(4)], None, True)
    assert paths(*args) == [
        ("args[0]['b']", (), "float32"),
        ("args[0]['w']", (2, 3), "float32"),
        ("args[1][0]", (4,), "int32"),
        ("args[3]", (), "bool"),
    ]


def test_keys_and_abstract_arguments():
    spec = jax.ShapeDtypeStruct((5, 2), jnp.dtype("bfloat16"))
    assert paths(jax.random.key(0), spec) == [
        ("args[0]", (), "key<fry>"),
        ("args[1]", (5, 2), "bfloat16"),
    ]


def test_sources_stand_for_trees():
    tree = {"x": np.ones((6, 2), "float32"), "k": jax.random.split(jax.random.key(0), 6)}
    arguments, _, restore = flatten_arguments((1.0, bj.from_arrays(tree), [2.0]))
    assert [(a.path, a.leaf, a.is_source) for a in arguments] == [
        ("args[0]", 0, False),
        ("args[1]['k']", 0, True),
        ("args[1]['x']", 1, True),
        ("args[2][0]", 0, False),
    ]
    assert str(arguments[1].aval.dtype) == "key<fry>"
    assert arguments[2].aval.shape == (6, 2)
    assert restore(["a", "b", "c", "d"]) == ("a", {"k": "b", "x": "c"}, ["d"])


def test_float64_sources_are_as_wide_as_jax_is():
    (argument,), _, _ = flatten_arguments((bj.from_arrays(np.ones((6, 2))),))
    assert argument.aval.dtype == "float32"


def test_the_key_of_a_structure():
    source = bj.from_arrays(np.ones((6, 2), "float32"))
    keys = {flatten_arguments(args)[1] for args in [(1.0, 2.0), ((1.0, 2.0),), (1.0, source)]}
    assert len(keys) == 3
    assert flatten_arguments((1.0, [2]))[1] == flatten_arguments((np.ones(3), [5]))[1]


@pytest.mark.parametrize(
    "leaf", ["text", object(), np.asarray(["a"])], ids=["str", "object", "array"]
)
def test_leaves_that_are_no_data(leaf):
    with pytest.raises(StructureError, match=r"args\[0\]\['name'\]: found a .* functools.partial"):
        flatten_arguments(({"name": leaf},))


def test_the_staged_function():
    @bj.program(clients=3)
    def mean(w, x):
        return {"mean": bj.reduce_mean(bj.map_fn(lambda v: v * w, x)), "none": None}

    arguments, _, restore = flatten_arguments((2.0, jnp.arange(3.0)))
    staged = stage(mean, arguments, restore)
    assert staged.name == "mean"
    assert staged.placements == (("clients", 3),)
    tree = jax.tree.unflatten(staged.out_tree, [1])
    assert tree == {"mean": 1, "none": None}
    assert "bj_map" in str(staged)
    assert [v.aval.shape for v in staged.closed.jaxpr.invars] == [(), (3,)]


def test_names():
    class Model:
        def __call__(self, x):
            return x

    assert name_of(functools.partial(functools.partial(test_names, 1), 2)) == "test_names"
    assert name_of(Model()) == "Model"
    assert name_of(jax.jit(test_names)) == "test_names"
