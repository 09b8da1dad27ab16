"""What of JAX works on which runner, as a table: docs/conformance.md.

`python tests/conformance.py` reads it off the plans of the programs. `end_to_end/test_programs.py`
checks these, and the values that the programs give.
"""

import re
import warnings
from pathlib import Path

import jax
from explained import facts_of
from programs import PROGRAMS

import beamjax as bj
from beamjax._text import human_bytes

PATH = Path(__file__).parents[1] / "docs" / "conformance.md"
TEXT = PATH.read_text(encoding="utf-8")
RUNNERS = ("local", "DirectRunner")
COLUMNS = ("", "in-process (`jit`)", *(f"`{runner}`" for runner in RUNNERS))
VERSION = ".".join(jax.__version__.split(".")[:2])

# By section: a program of the table, and the rows that it stands for.
TABLE = {
    "Operators": """
        broadcast_then_map: `broadcast`
        plain: `map_fn` | `map_fn` that closes over server values
        map_without_operands: `map_fn` without operands
        reductions: `reduce_sum` | `reduce_mean` | `reduce_max` | `reduce_min` | `reduce_prod`
        variances: `reduce_var`, `reduce_std`, differentiated
        reductions: `reduce_any` | `reduce_all` | `reduce_weighted_mean`
        grad_by_key: `reduce_by_key`, differentiated
        quantiles: `quantile` | `quantile` by key | `quantile`, differentiated
        extremes_by_key_and_their_places: `reduce_argmax`, `reduce_argmin`
        affine_maps_in_order: `reduce` by a function
        neighbours: `neighbours`, with `fill` and with `wrap`
        slopes_of_neighbours: `neighbours`, differentiated
        neighbours_in_rounds: `neighbours` in a `lax.scan` of rounds
        two_placements: two placements
        nested_placements: a placement in a body of another
    """,
    "Transformations of whole programs": """
        jit_around: `jax.jit`
        grad_server: `jax.grad`
        grad_placed: `jax.grad` by placed values
        value_and_grad: `jax.value_and_grad`
        jvp: `jax.jvp`
        vjp: `jax.vjp`
        vjp_of_placed_result: `jax.vjp` of placed results
        linearize: `jax.linearize`
        linear_transpose: `jax.linear_transpose`
        vmap_server: `jax.vmap` over server values
        vmap_placed_first: `jax.vmap` over placed values
        vmap_grad: `jax.vmap(jax.grad(...))`
        grad_vmap: `jax.grad` of `jax.vmap`
        jacfwd: `jax.jacfwd`
        jacrev: `jax.jacrev`
        hessian: `jax.hessian`
        maml: `jax.grad` through `jax.grad`
        checkpoint_around: `jax.checkpoint`
        checkpoint_with_policy: `jax.checkpoint` with a policy
        custom_vjp_of_programs: `jax.custom_vjp` of programs
        closure_convert: `jax.closure_convert`
        jacrev: `jax.lax.stop_gradient`
        grad_of_max: `jax.grad` of `reduce_max`
        grad_of_weighted_mean: `jax.grad` of `reduce_weighted_mean`
        named: `jax.named_call`, `jax.named_scope`
        exported: `jax.export` of a program
    """,
    "Control flow in the body of a map": """
        jacrev: `lax.scan`, differentiated | `lax.fori_loop`, differentiated
        jacfwd: `lax.while_loop`, forward derivative
        jacrev: `lax.cond`, differentiated
        body_control_flow: `lax.switch` | `lax.map` | `lax.associative_scan`
        in_body: `jax.new_ref`
    """,
    "Control flow around operators": """
        scan_over_rounds: `lax.scan` of rounds
        grad_of_placed_state: `jax.grad` of a `lax.scan` of rounds
        scan_over_placed: `lax.scan` over placed values
        fori_that_swaps: `lax.fori_loop`
        while_on_a_reduced_value: `lax.while_loop` on a reduced value
        cond_either_way: `lax.cond`
        grad_of_a_branch: `jax.grad` of `lax.cond`
        switch_in_rounds: `lax.switch`
    """,
    "Transformations and functions in the body of a map": """
        plain: `jax.grad`
        jacrev: `jax.jit` | `jax.checkpoint` | `jax.custom_jvp` | `jax.custom_vjp`
        body_transformations: `jax.vmap`
        jacrev: `jnp.linalg.solve`, `cholesky`
        body_signals: `jnp.linalg.eigh` | `jnp.linalg.svd` | `jnp.fft.fft` | `lax.conv`
        body_sorting: `jnp.sort`, `argsort` | `jnp.searchsorted`
        body_host: `jax.debug.print` | `jax.debug.callback` | `jax.pure_callback`
    """,
    "Placed values outside of `map_fn`": """
        at_each_member: `jax.vmap(..., axis_name=...)`
        elementwise: arithmetic with server values | `jnp.where(jnp.arange(n) == 0, ...)` | `x @ w`
        reduced: `x.T @ x`, a sum over members
        gathered: `x @ x.T`, all pairs of members
        reduced: `jnp.sum(x, axis=0)`, `mean`, `max` | `jax.ops.segment_sum`
        elementwise: transpose and reshape | indexing of other axes | `x.at[:, i].add`
        picked: `x[3]`, one member | `x[indices]`
        slopes: `lax.map` over members, differentiated
        mapped: `lax.map` over members with a batch size
        totals_of_a_scan: `lax.scan` over members that only adds
        gathered: `lax.scan` over members that reads its carry
        gathered: `jnp.sort` along members
        slopes: `jnp.cumsum` along members, differentiated
        running_totals: `jnp.cumprod` along members
        running_totals: `lax.cummax`, `cummin` along members
        running_totals: `lax.cumlogsumexp` along members
        scanned_by_a_function: `cumprod`, `cumlogsumexp`, differentiated
        scanned_by_a_function: `lax.associative_scan` along members
        totals_in_rounds: `jnp.cumsum` along members in a `lax.scan` of rounds
        shifted: `jnp.roll`, `jnp.diff`, `jnp.pad` along members
        shifted: `jnp.convolve`, `jnp.correlate`, `lax.reduce_window` along members
        shifted: `x[1:]`, `x[::-1]`, `jnp.split` of members
        reduced: `jnp.histogram`, `bincount` of members
        gathered: `jnp.median`, `quantile` along members
        tall_matrices: `jnp.linalg.qr`, `svd` of members as rows
        tall_matrices: `jnp.linalg.lstsq`, `pinv` of members as rows
        elementwise: `jax.nn.softmax` along members
        gathered: `jnp.concatenate` of members
        entries: `x.ravel()[i]`
    """,
    "Types": """
        types: `float32` | `bfloat16` | `float16` | `complex64` | `int32` | `int16` | `int8`
        types: `uint32` | `uint16` | `uint8` | `int4`, which `jnp` does not sum
        body_dtypes: `float8_e4m3fn` and the other types of a byte or less, in bodies
        bools: `bool`
        wide_types: `float64` (x64) | `int64` (x64) | `uint64` (x64) | `complex128` (x64)
        keys_placed_and_closed_over: typed keys
        keys_as_results: typed keys as results
        gradients_of_integers: `float0` (gradients of integers)
        body_zero_sizes: arrays of size zero
        weak_results: Python scalars as arguments
        numpy_arguments: NumPy arrays as arguments
        not_finite: NaN and infinity
    """,
    "Random numbers": """
        monte_carlo: `jax.random.split(key, n)` outside
        keys_broadcast_and_batched: `fold_in(key, i)` in a body | `jax.vmap` over keys
        keys_placed_and_closed_over: keys that a body closes over
        monte_carlo: draws on the server, of all members
        body_other_keys: `rbg` keys in a body
    """,
    "Trees": """
        trees: dicts and `None` | registered dataclasses
        body_trees: named tuples
        diloco: `flax.struct`
        sparse_members: sparse arrays of `jax.experimental.sparse`
    """,
    "Idioms": """
        fedavg: federated averaging, weighted, Adam of `optax`
        linen_and_momentum: `flax.linen` and momentum of `optax`
        modules_with_generators: `flax.nnx`
        diloco: DiLoCo: placed optimizer state in and out
        private_sum: clipped gradients and noise
        k_means: k-means
        reduced: covariance of members
        monte_carlo: Monte Carlo without inputs
        by_rate: gradient by a learning rate
        vmap_server: ensembles: `vmap` over models
        printed_on_the_server: `jax.debug.print` of a reduced value
    """,
}


def rows(text):
    """The programs and names of the rows of a section."""
    for line in text.strip().splitlines():
        program, names = line.strip().split(": ", 1)
        yield from ((program, name) for name in names.split(" | "))


def cells() -> dict[str, str]:
    """What becomes of each program of the table on a runner, by its plan."""
    return {program: cell(program) for text in TABLE.values() for program, _ in rows(text)}


def cell(program: str) -> str:
    case = PROGRAMS[program]
    if "gathers" not in case.plan:  # As `test_programs` finds.
        return "passed"
    with case.settings():
        fn, args = case.build(bj)
        gathered = facts_of(bj.explain(fn, *args, options={"shard_size": 8})).gathered_bytes
    return f"gathered {human_bytes(gathered)}".replace(" ", "&nbsp;")  # On one line.


def without_bytes(text: str) -> str:
    """The table without what depends on the version of JAX."""
    return re.sub(r"gathered [^|]* \||JAX \S+\.\n", "", text)


def markdown(texts: dict[str, str]) -> str:
    """The table, as a file."""
    lines = [
        "# Conformance",
        "",
        "Which JAX features work, and where. Each row is part of a small program, which the tests "
        "run.",
        f"`python tests/conformance.py` writes this page, here with JAX {VERSION}.",
        "",
        "- *passed*: tree, shapes, dtypes and values are right: in this process against the same "
        "program by",
        "  `jax.vmap` and `jnp`, on a runner against `jax.jit`. Both runners give the same bits.",
        "- *gathered*: passed, but beamjax gathers members on one machine. The number is the bytes "
        "of all of them.",
    ]
    for section, text in TABLE.items():
        lines += ["", f"## {section}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [
            _line([name, "passed", *[texts[program]] * len(RUNNERS)])
            for program, name in rows(text)
        ]
    return "\n".join(lines) + "\n"


def _line(row) -> str:
    return f"| {' | '.join(row)} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PATH.write_text(markdown(cells()), encoding="utf-8")
