"""Which operations run along the members, and that those that do give what `jax.jit` gives.

The rows are in `rule_rows`: small programs, and what the plan should make of each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import all_steps, facts_of
from helpers import assert_close
from jax import lax
from programs import run_everywhere, step_kinds
from rule_rows import GROUPS, N, Placed

import beamjax as bj
from beamjax.interpreters.rules import factors, rule_table
from beamjax.interpreters.rules.sharding_rules import TABLE

OPTIONS = {"shard_size": 8}
IN_GATE = """
    unary_1 ints bools slices across along_1 sliced reshaped indexing_fill by_a_function
    by_a_lax_function cube_1 one_member empty_members infinite_last
""".split()
"""Groups of which the values are checked for every change; the others are checked each night."""


def _computed(v):
    """The value itself, as a result of a pass: an argument in memory is never gathered."""
    return lax.optimization_barrier(v)


def as_program(function, args):
    """The program of `function` on the arguments, and the arguments as plain arrays."""
    n = next(len(a.value) for a in args if isinstance(a, Placed))

    @bj.program(clients=n)
    def prog(*values):
        return function(
            *(
                jnp.moveaxis(bj.map_fn(_computed, x), 0, a.axis) if isinstance(a, Placed) else x
                for x, a in zip(values, args, strict=True)
            )
        )

    return prog, [a.value if isinstance(a, Placed) else a for a in args]


def element(function, i):
    return lambda *args: function(*args)[i]


def misread(prog, values, kind):
    """What the plan of a program does otherwise than rows of this kind."""
    facts = facts_of(bj.explain(prog, *values, options=OPTIONS))
    steps = list(all_steps(facts.steps))
    gathers = [f"gathers at {step.lines}" for step in steps if step.kind == "Gather"]
    if kind == "gather":
        return [] if gathers else ["gathers nothing"]
    placed = {v.name: v.member_bytes is not None for step in steps for v in step.results}
    return gathers + [
        f"{out.path} is {out.type}"
        for out in facts.outputs
        if placed.get(out.value, kind == "local") != (kind == "local")
    ]


def faults_of_reading(kind, function, args):
    prog, values = as_program(function, args)
    if kind != "gather" and not misread(prog, values, kind):
        return []
    # One row at a time: a program that picks many members gathers them.
    rows = [element(prog, i) for i in range(len(jax.eval_shape(prog, *values)))]
    faults = {f"{kind}[{i}]": misread(row, values, kind) for i, row in enumerate(rows)}
    return [f"{row} {fault}" for row, found in faults.items() for fault in found]


@pytest.mark.versions
@pytest.mark.parametrize("name", GROUPS)
def test_what_rows_read(name):
    args, functions = GROUPS[name]
    found = {kind: faults_of_reading(kind, fn, args) for kind, fn in functions.items()}
    assert [fault for faults in found.values() for fault in faults] == []


WITHOUT_ROWS = """
    compressed_words eig eq_to geqrf hessenberg log2 mulhi random_gamma_grad schur threefry2x32
""".split()
"""Primitives without a row: few programs use them, and some versions of JAX do not have them."""
NEW_IN_JAX = {"one_minus_square", "polynomial"} if jax.__version_info__ < (0, 12) else set()


@pytest.mark.versions
def test_every_rule_fires(monkeypatch):
    fired = set()

    def noted(name, sharding_rule):
        def found(*args):
            result = sharding_rule(*args)
            fired.update([name] if result is not None else [])
            return result

        return found

    of_label, names = factors._of_label, set()
    for name, answers in TABLE.items():
        noting = {}
        for kind in ("reduction", "rule", "creation", "expansion"):
            if found := getattr(answers, kind):
                label = f"{name} expanded" if kind == "expansion" else name
                noting[kind] = noted(label, found)
                names.add(label)
        names.update([name] if answers.factors else [])
        monkeypatch.setitem(TABLE, name, answers._replace(**noting))
    names = {name for name in names if not name.startswith("bj_")}
    monkeypatch.setattr(
        factors, "_of_label", lambda eqn, *args: noted(eqn.primitive.name, of_label)(eqn, *args)
    )
    for args, functions in GROUPS.values():
        for kind, function in functions.items():
            if kind != "gather":
                prog, values = as_program(function, args)
                bj.explain(prog, *values, options=OPTIONS)
    assert sorted(names - fired - NEW_IN_JAX - set(WITHOUT_ROWS)) == []


def test_a_placed_operator_without_a_rule_is_an_error_at_import():
    rule_table.check_operators(["bj_map", "bj_neighbours"])
    with pytest.raises(TypeError, match=r"no rule of the placed operators \['bj_unknown'\]"):
        rule_table.check_operators(["bj_map", "bj_unknown"])


def marked(name):
    return name if name in IN_GATE else pytest.param(name, marks=pytest.mark.table)


@pytest.mark.parametrize("name", [marked(name) for name in GROUPS])
def test_values(name):
    if name in IN_GATE:
        jax.config.update("jax_disable_most_optimizations", True)  # Compiles in half of the time.
    args, functions = GROUPS[name]
    prog, values = as_program(lambda *xs: {k: f(*xs) for k, f in functions.items()}, args)
    found = bj.run(prog, *values, runner="local", options=OPTIONS)
    assert_close(found, jax.jit(prog)(*values), rtol=2e-5, atol=2e-5)


def test_a_member_picked_out_is_not_rounded():
    numbers = [-0.0, 0.1, np.nan, -np.inf, np.inf, 3.0, 1e-7, -5.0]
    tables = {}
    for dtype in ("float32", "bfloat16", "float16", "int32", "uint8", "bool"):
        row = jnp.asarray(numbers if jnp.issubdtype(dtype, jnp.inexact) else range(8))
        row = row.astype(dtype)
        tables[dtype] = jnp.stack([row, jnp.flip(row), *[row] * 17])

    @bj.program(clients=19)
    def ends(tables, i):
        rows = bj.map_fn(lambda row: row, tables)
        return jax.tree.map(lambda rows: (rows[0], rows[-1], rows[i]), rows)

    assert facts_of(bj.explain(ends, tables, 1)).gathered_bytes == 0
    found = bj.run(ends, tables, 1, runner="local", options=OPTIONS)
    assert_close(found, jax.jit(ends)(tables, 1), rtol=0, atol=0)


def test_the_server_reads_a_row_of_its_own_table():
    @bj.program(clients=N)
    def row(table, x):
        return table[0] + bj.reduce_sum(bj.map_fn(lambda v: v, x))

    facts = facts_of(bj.explain(row, jnp.ones((N, 3)), jnp.ones((N, 3))))
    assert [i.names for i in facts.inputs] == [["arg0"], ["arg1@clients"]]


# --- reductions whose partials a function brings together

M = 20
RNG = np.random.default_rng(3)
X = jnp.asarray(RNG.normal(size=(M, 3)), "float32")
SPECIAL = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
HIGHEST = {
    "special": jnp.asarray(RNG.choice(SPECIAL, (M, 3))),
    "equal": jnp.zeros((M, 3), "int32"),
    "lowest": jnp.full((M, 3), -128, "int8"),
    "uint8": jnp.asarray(RNG.integers(0, 4, (M, 3)), "uint8"),
}


def test_the_highest_values_of_more_than_a_shard():
    @bj.program(clients=M)
    def highest(xs):
        xs = bj.map_fn(lambda v: v, xs)
        return jax.tree.map(lambda x: (lax.top_k(x[:, 0], 3), lax.top_k(x.T, 10)), xs)

    assert "Gather" not in step_kinds(highest, HIGHEST, **OPTIONS)
    found = bj.run(highest, HIGHEST, runner="local", options=OPTIONS)
    assert_close(found, jax.jit(highest)(HIGHEST), rtol=0, atol=0)


def test_beam_gives_the_same_bits():
    @bj.program(clients=M)
    def prog(x):
        x = bj.map_fn(lambda v: v, x)
        bits = lax.bitcast_convert_type(x, np.dtype("int32"))
        mixed = lax.reduce(x, 0.0, lambda a, b: a + b + a * b / 8, (0,))
        return lax.top_k(x[:, 0], 3), mixed, jnp.bitwise_xor.reduce(bits), jnp.argmax(x)

    run_everywhere(prog, X / 4, **OPTIONS)


def test_a_slope_gathers_the_leaves_that_it_depends_on():
    combined = [
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lambda a, b: (a[0] * b[0], a[1] + b[1]),
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]),
    ]
    leaves = lambda v: (v[0] / 2, v[1] / 3)
    for gathers, combine in enumerate(combined):
        total = lambda x, combine=combine: sum(bj.reduce(combine, bj.map_fn(leaves, x)))
        slope = jax.grad(bj.program(clients=M)(total))
        assert step_kinds(slope, X / 2, **OPTIONS)["Gather"] == gathers
        found = bj.run(slope, X / 2, runner="local", options=OPTIONS)
        assert_close(found, jax.jit(slope)(X / 2))
