"""The linear algebra of JAX in bodies and on the server: all that `jit` computes here."""

import inspect

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from helpers import assert_close
from jax.extend.core import jaxprs_in_params

import beamjax as bj

N, SIZE = 11, 4  # the last shard holds three members
MODULES = {
    "jnp.linalg": jnp.linalg, "jax.lax.linalg": jax.lax.linalg, "jax.scipy.linalg": jax.scipy.linalg
}  # fmt: skip
VECTOR = jnp.asarray([1.0, -0.5, 0.25, 2.0])
PIVOTS = jnp.asarray([2, 1, 3, 3])

ARGUMENTS = {
    "jnp.linalg.lstsq": lambda a: (a[:, :2], VECTOR),
    "jnp.linalg.tensorinv": lambda a: (a, 1),
    "jax.lax.linalg.cholesky_update": lambda a: (jnp.linalg.cholesky(a).T, a[0]),
    "jax.lax.linalg.householder_product": lambda a: (a, VECTOR),
    "jax.lax.linalg.lu_pivots_to_permutation": lambda a: (PIVOTS + a[0].astype(int) * 0, SIZE),
    "jax.lax.linalg.ormqr": lambda a: (a, VECTOR, a),
    "jax.lax.linalg.tridiagonal_solve": lambda a: (a[0], a[1] + 9, a[2], a),
    "jax.scipy.linalg.cho_solve": lambda a: ((a, True), VECTOR),
    "jax.scipy.linalg.eigh_tridiagonal": lambda a: (a[0], a[1, :-1], True),
    "jax.scipy.linalg.expm_frechet": lambda a: (a / 9, a / 5),
    "jax.scipy.linalg.funm": lambda a: (a, jnp.sin),
    "jax.scipy.linalg.lu_solve": lambda a: ((a, PIVOTS), VECTOR),
    "jax.scipy.linalg.rsf2csf": lambda a: (a, a),
    "jax.scipy.linalg.solve_sylvester": lambda a: (a, a, a),
}
"""Of functions that take neither a matrix, nor two matrices, nor a size."""

WITH_PIVOTS = {
    "jax.scipy.linalg.qr, pivoting": lambda a: jax.scipy.linalg.qr(a, pivoting=True),
    "jax.lax.linalg.qr, pivoting": lambda a: jax.lax.linalg.qr(a, pivoting=True),
    "jax.scipy.linalg.qr_multiply, left": lambda a: jax.scipy.linalg.qr_multiply(
        a, a, "left", pivoting=True
    ),
    "jax.scipy.linalg.schur, complex": lambda a: jax.scipy.linalg.schur(a, output="complex"),
    "jnp.linalg.eig, complex": lambda a: jnp.linalg.eigvals(jax.lax.complex(a, a.T * 2)),
    "jnp.linalg.qr, complex": lambda a: jnp.linalg.qr(jax.lax.complex(a, a * 2)),
}


def called(name, function):
    """The function of one matrix that calls `function`, for the first arguments that it takes."""
    spec = jax.ShapeDtypeStruct((N, SIZE, SIZE), np.dtype("float32"))
    given = ARGUMENTS.get(name)
    for arguments in [given] if given else [lambda a: (a,), lambda a: (a, a), lambda a: (SIZE,)]:
        one = lambda a, arguments=arguments: jax.tree.map(jnp.asarray, function(*arguments(a)))
        try:
            jax.eval_shape(jax.vmap(one), spec)
        except Exception:  # functions that take something else, or have no rule for `vmap`
            continue
        return one
    return None


def functions():
    """All functions of the modules that `jit` computes here, by name, as functions of a matrix."""
    found = {
        f"{name}.{attribute}": value
        for name, module in MODULES.items()
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and callable(value) and not inspect.isclass(value)
        if not isinstance(value, jax.extend.core.Primitive)
    }
    runs = {name: called(name, function) for name, function in found.items()}
    return {name: run for name, run in runs.items() if run is not None} | WITH_PIVOTS


def members():
    a = np.random.default_rng(0).standard_normal((N, SIZE, SIZE))
    return jnp.asarray(a @ a.swapaxes(1, 2) + np.eye(SIZE), "float32")


def in_both_places(fns):
    @bj.program(clients=N)
    def program(x):
        whole = bj.reduce_mean(x)
        body = lambda a: {name: fn(a) for name, fn in fns.items()}
        return bj.map_fn(body, x), {name: fn(whole) for name, fn in fns.items()}

    return program


def primitives_of(jaxpr):
    inner = [primitives_of(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*inner)


def some_of(fns):
    """Those that call a primitive that none before them calls, and those with options."""
    called, some = set(), {}
    for name, fn in fns.items():
        primitives = primitives_of(jax.make_jaxpr(jax.vmap(fn))(members()).jaxpr)
        if name in WITH_PIVOTS or not primitives <= called:
            some[name] = fn
        called |= primitives
    return some


@pytest.mark.versions
@pytest.mark.parametrize("choose", [some_of, pytest.param(dict, marks=pytest.mark.table)])
def test_all_that_jit_computes(choose):
    jax.config.update("jax_disable_most_optimizations", True)  # Compiles in half of the time.
    fns = functions()
    assert len(fns) > 60, sorted(fns)
    fns = choose(fns)
    program = in_both_places(fns)
    expected = jax.jit(program)(members())
    for runner in ("local", "DirectRunner"):
        # LAPACK as JAX calls it is not safe in several threads: in fresh processes, `jit` alone
        # computes another value for one of these functions in about one of 75 first calls.
        for left in (2, 1, 0):
            found = bj.run(program, members(), runner=runner, options={"shard_size": 8})
            try:
                assert_close(found, expected, rtol=1e-3, atol=1e-3)
                break
            except AssertionError:
                if not left:
                    raise
                expected = jax.jit(program)(members())
