"""Which operations run along the members, and that those that do give what jax.jit gives.

The rows are in `rule_rows`: small programs, and what the plan should make of each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_rows import GROUPS, N, Placed

import beamjax as bj
from beamjax.interpreters import flatten, place, rules, split, stage
from beamjax.interpreters.pieces import GatherPiece

OPTIONS = {"shard_size": 8}


def as_program(function, args):
    """The program of `function` on the arguments, and the arguments as plain arrays."""
    n = next(len(a.value) for a in args if isinstance(a, Placed))

    @bj.program(clients=n)
    def prog(*values):
        return function(
            *(
                jnp.moveaxis(bj.map_fn(lambda v: v, x), 0, a.axis) if isinstance(a, Placed) else x
                for x, a in zip(values, args, strict=True)
            )
        )

    return prog, [a.value if isinstance(a, Placed) else a for a in args]


def kind_of(function, args):
    """Stages a program as far as its pieces, and says what became of it."""
    prog, values = as_program(function, args)
    flat_args, _, restore = stage.flatten_arguments(values)
    staged = stage.stage(prog, flat_args, restore)
    program = place.place(flatten.flatten(staged.closed), {}, staged.placements)
    if any(isinstance(piece, GatherPiece) for piece in split.split(program)):
        return "gather"
    outs = {program.place(out) is None for out in program.flat.outputs}
    assert len(outs) == 1, "some results are placed, others are not"
    return "fold" if outs.pop() else "local"


def run_both(function, args):
    """What jax.jit and a run in shards of 8 give."""
    prog, values = as_program(function, args)
    return jax.jit(prog)(*values), bj.run(prog, *values, runner="local", options=OPTIONS)


def raw(x):
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)


def assert_same(want, got, name=""):
    assert jax.tree.structure(want) == jax.tree.structure(got), name
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        where = f"{name}{jax.tree_util.keystr(path)}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        a, b = raw(a), raw(b)
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(b, a, err_msg=where)
        else:
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            tolerance = {"bfloat16": 2e-2, "float16": 2e-3}.get(a.dtype.name, 2e-5)
            a, b = a.astype(wide), b.astype(wide)
            np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance, err_msg=where)


ROWS = [(name, row) for name, group in GROUPS.items() for row in group.rows]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[".".join(row) for row in ROWS])
def test_reading(name, row):
    members = GROUPS[name]
    kind, function = members.rows[row]
    assert kind_of(function, members.args) == kind


@pytest.mark.table
@pytest.mark.parametrize("name", GROUPS)
def test_values(name):
    members = GROUPS[name]
    functions = {row: function for row, (_, function) in members.rows.items()}
    want, got = run_both(lambda *args: {r: f(*args) for r, f in functions.items()}, members.args)
    assert_same(want, got, name)


def test_the_table_knows_every_rule():
    seen = set()
    for members in GROUPS.values():
        for _, function in members.rows.values():
            prog, values = as_program(function, members.args)
            flat = flatten.flatten(jax.make_jaxpr(prog)(*values))
            seen.update(eqn.primitive.name for eqn in flat.eqns)
    # Only some versions or platforms have these, or other tests hold them.
    rare = {
        "eig", "mulhi", "tile", "schur", "hessenberg", "geqrf", "scatter-sub", "mul_add", "log2",
        "regularized_incomplete_beta", "random_gamma_grad", "igamma_grad_a", "igammac", "add_any",
        "one_minus_square", "stack", "unstack", "split", "threefry2x32", "reduce_window_min", "not",
        "eq_to", "le_to", "lt_to", "select_and_gather_add", "polynomial", "compressed_words",
    }  # fmt: skip
    missing = {r for r in rules.RULES if not r.startswith("bj_")} - seen - rare
    assert not missing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_a_member_picked_out_is_not_rounded(dtype):
    values = [-0.0, 0.1, np.nan, -np.inf, np.inf, 3.0, 1e-7, -5.0]
    values = jnp.asarray(values if jnp.issubdtype(dtype, jnp.inexact) else range(8)).astype(dtype)
    table = jnp.stack([values, jnp.flip(values), *[values] * 17])

    @bj.program(clients=19)
    def ends(table, i):
        kept = bj.map_fn(lambda row: row, table)
        return kept[0], kept[-1], kept[i]

    assert bj.explain(ends, table, 1).facts.gathered_bytes == 0
    found = bj.run(ends, table, 1, runner="local", options=OPTIONS)
    for row, want in zip(found, jax.jit(ends)(table, 1), strict=True):
        assert row.dtype == want.dtype
        np.testing.assert_array_equal(row.astype("float32"), want.astype("float32"))


def test_the_server_reads_a_row_of_its_own_table():
    @bj.program(clients=N)
    def row(table, x):
        return table[0] + bj.reduce_sum(bj.map_fn(lambda v: v, x))

    facts = bj.explain(row, jnp.ones((N, 3)), jnp.ones((N, 3))).facts
    assert [i.values for i in facts.inputs] == [("arg0",), ("arg1@clients",)]
