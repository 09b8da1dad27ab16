"""What of JAX works on which runner, as a table that running it makes: docs/conformance.md.

`python tests/conformance.py` runs every row and writes the table.
"""

import contextlib
import dataclasses
import functools
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import conformance_programs as more
import jax
import jax.numpy as jnp
import numpy as np
from conformance_programs import in_body, of_dtype, outside, program, reducing, transformed
from explained import check_explanation
from helpers import assert_same_bits, assert_same_types
from jax import lax
from programs import CASES, KEY, WS, N, W, X, Y, reference, sum_over

import beamjax as bj
from beamjax._text import human_bytes
from beamjax.verification import compare

PATH = Path(__file__).parents[1] / "docs" / "conformance.md"
TEXT = PATH.read_text(encoding="utf-8")
RUNNERS = ("local", "DirectRunner")
COLUMNS = ("", "in-process (`jit`)", *(f"`{runner}`" for runner in RUNNERS))
OPTIONS = {"shard_size": 8}
VERSION = ".".join(jax.__version__.split(".")[:2])


@dataclasses.dataclass(frozen=True)
class Row:
    """A program, as a function of the operators, and whether it takes 64-bit numbers."""

    build: Callable
    x64: bool = False


def case(name):
    return Row(CASES[name].build)


TABLE: dict[str, dict[str, Row]] = {
    "Operators": {
        "`broadcast`": case("broadcast_then_map"),
        "`map_fn`": Row(in_body(jnp.sin, X)),
        "`map_fn` that closes over server values": Row(
            lambda ops: (sum_over(ops, lambda w, x: (x @ w) ** 2), (W, X))
        ),
        "`map_fn` without operands": case("map_without_operands"),
        "`reduce_sum`": Row(reducing("sum")),
        "`reduce_mean`": Row(reducing("mean")),
        "`reduce_max`": Row(reducing("max")),
        "`reduce_min`": Row(reducing("min")),
        "`reduce_prod`": Row(reducing("prod")),
        "`reduce_any`": Row(reducing("any", X > 1)),
        "`reduce_all`": Row(reducing("all", X > -1)),
        "`reduce_weighted_mean`": Row(
            program(lambda ops, x, w: ops.reduce_weighted_mean(x, w), X, jnp.arange(1.0, N + 1))
        ),
        "two placements": case("two_placements"),
        "a placement in a body of another": case("nested_placements"),
    },
    "Transformations of whole programs": {
        "`jax.jit`": case("jit_around"),
        "`jax.grad`": case("grad_server"),
        "`jax.grad` by placed values": case("grad_placed"),
        "`jax.value_and_grad`": case("value_and_grad"),
        "`jax.jvp`": case("jvp"),
        "`jax.vjp`": Row(more.vjp),
        "`jax.vjp` of placed results": case("vjp_of_placed_result"),
        "`jax.linearize`": case("linearize"),
        "`jax.linear_transpose`": case("linear_transpose"),
        "`jax.vmap` over server values": case("vmap_server"),
        "`jax.vmap` over placed values": case("vmap_placed_first"),
        "`jax.vmap(jax.grad(...))`": case("vmap_grad"),
        "`jax.grad` of `jax.vmap`": case("grad_vmap"),
        "`jax.jacfwd`": case("jacfwd"),
        "`jax.jacrev`": case("jacrev"),
        "`jax.hessian`": case("hessian"),
        "`jax.grad` through `jax.grad`": case("maml"),
        "`jax.checkpoint`": case("checkpoint_around"),
        "`jax.checkpoint` with a policy": case("checkpoint_with_policy"),
        "`jax.custom_vjp` of programs": case("custom_vjp_of_programs"),
        "`jax.closure_convert`": Row(more.closure_convert),
        "`jax.lax.stop_gradient`": case("stop_gradient"),
        "`jax.grad` of `reduce_max`": case("grad_of_max"),
        "`jax.grad` of `reduce_weighted_mean`": case("grad_of_weighted_mean"),
        "`jax.named_call`, `jax.named_scope`": Row(transformed(jax.named_call, W, X, Y)),
        "`jax.export` of a program": case("exported"),
    },
    "Control flow in the body of a map": {
        "`lax.scan`, differentiated": case("scan_in_body"),
        "`lax.fori_loop`, differentiated": case("fori_in_body"),
        "`lax.while_loop`, forward derivative": case("while_in_body"),
        "`lax.cond`, differentiated": case("cond_in_body"),
        "`lax.switch`": Row(in_body(more.switch_in_body, X, more.IDS)),
        "`lax.map`": Row(in_body(lambda v: lax.map(jnp.sum, v), X)),
        "`lax.associative_scan`": Row(in_body(lambda v: lax.associative_scan(jnp.add, v), X)),
        "`jax.new_ref`": case("reference_in_body"),
    },
    "Control flow around operators": {
        "`lax.scan` of rounds": case("scan_of_rounds"),
        "`jax.grad` of a `lax.scan` of rounds": case("grad_of_scan_of_rounds"),
        "`lax.scan` over placed values": case("scan_over_placed"),
        "`lax.fori_loop`": Row(more.fori_around),
        "`lax.while_loop` on a reduced value": case("while_of_rounds"),
        "`lax.cond`": case("cond_around"),
        "`jax.grad` of `lax.cond`": case("grad_of_cond_around"),
        "`lax.switch`": Row(more.switch_around),
    },
    "Collectives in the body of a map": {
        "`lax.psum(v, \"clients\")`": Row(in_body(lambda v: v * lax.psum(v, "clients"), X)),
        "`lax.pmean`": Row(in_body(lambda v: v - lax.pmean(v, "clients"), X)),
        "`lax.pmax`, `pmin`": Row(
            in_body(lambda v: lax.pmax(v, "clients") - lax.pmin(v, "clients"), X)
        ),
        "`lax.axis_index`": Row(in_body(lambda v: v * lax.axis_index("clients"), X)),
        "`lax.all_gather`": Row(in_body(lambda v: v @ lax.all_gather(v, "clients")[::2, 0].T, X)),
        "`lax.pmean` in a `lax.scan` of rounds": Row(in_body(more.rounds_in_body, X)),
        "`jax.vmap(..., axis_name=...)`, outside of a map": Row(
            outside(lambda x: jax.vmap(lambda v: v - lax.pmean(v, "i"), axis_name="i")(x))
        ),
    },
    "Transformations and functions in the body of a map": {
        "`jax.grad`": case("plain"),
        "`jax.jit`": case("jit_in_body"),
        "`jax.vmap`": Row(in_body(jax.vmap(jnp.sum), X)),
        "`jax.checkpoint`": case("checkpoint_in_body"),
        "`jax.custom_jvp`": case("custom_jvp_in_body"),
        "`jax.custom_vjp`": case("custom_vjp_in_body"),
        "`jnp.linalg.solve`, `cholesky`": case("linear_algebra"),
        "`jnp.linalg.eigh`": Row(in_body(lambda x: jnp.linalg.eigvalsh(more.matrices(x)), X)),
        "`jnp.linalg.svd`": Row(in_body(lambda x: jnp.linalg.svd(x, compute_uv=False), X)),
        "`jnp.fft.fft`": Row(in_body(lambda x: jnp.abs(jnp.fft.fft(x)), X)),
        "`jnp.sort`, `argsort`": Row(in_body(lambda x: jnp.sort(x, 0)[jnp.argsort(x[:, 0])], X)),
        "`jnp.searchsorted`": Row(in_body(lambda x: jnp.searchsorted(jnp.arange(5.0), x), X)),
        "`lax.conv`": Row(in_body(lambda x: jnp.convolve(x[:, 0], x[:, 1]), X)),
        "`jax.debug.print`": Row(more.debug_print),
        "`jax.debug.callback`": case("callback_in_body"),
        "`jax.pure_callback`": Row(more.pure_callback),
    },
    "Placed values outside of `map_fn`": {
        "arithmetic with server values": Row(outside(lambda x, w: x * w - x, W[None, None])),
        "`jnp.where(jnp.arange(n) == 0, ...)`": Row(
            outside(lambda x: jnp.where((jnp.arange(N) == 0)[:, None, None], x, 0.0))
        ),
        "`x @ w`": Row(outside(lambda x, w: x @ w, W)),
        "`x.T @ x`, a sum over members": Row(
            outside(lambda x: x.reshape(N, -1).T @ x.reshape(N, -1))
        ),
        "`x @ x.T`, all pairs of members": Row(
            outside(lambda x: x.reshape(N, -1) @ x.reshape(N, -1).T)
        ),
        "`jnp.sum(x, axis=0)`, `mean`, `max`": Row(
            outside(lambda x: (jnp.sum(x, 0), jnp.mean(x, 0), jnp.max(x, 0)))
        ),
        "`jax.ops.segment_sum`": Row(
            outside(lambda x, i: jax.ops.segment_sum(x, i, 3), more.IDS % 3)
        ),
        "transpose and reshape": Row(outside(lambda x: jnp.swapaxes(x, 0, 2).reshape(15, N))),
        "indexing of other axes": Row(outside(lambda x: x[:, 1:, ::2])),
        "`x.at[:, i].add`": Row(outside(lambda x: x.at[:, 0].add(1.0))),
        "`x[3]`, one member": Row(outside(lambda x: x[3])),
        "`x[indices]`": Row(outside(lambda x, i: x[i], jnp.asarray([0, 2, 2]))),
        "`lax.map` over members, differentiated": Row(
            outside(jax.value_and_grad(lambda x: jnp.sum(lax.map(lambda v: jnp.sin(v) @ v.T, x))))
        ),
        "`lax.scan` over members that only adds": Row(
            outside(lambda x: lax.scan(lambda c, v: (c + v, v[0]), jnp.zeros((5, 3)), x))
        ),
        "`lax.scan` over members that reads its carry": Row(
            outside(lambda x: lax.scan(lambda c, v: (c * v, c), jnp.ones((5, 3)), x))
        ),
        "`jnp.sort` along members": Row(outside(lambda x: jnp.sort(x, 0))),
        "`jnp.cumsum` along members, differentiated": Row(
            outside(jax.value_and_grad(lambda x: jnp.sum(jnp.cumsum(x, 0) ** 2)))
        ),
        "`jnp.cumprod`, `lax.cummax`, `cummin` along members": Row(
            outside(lambda x: (jnp.cumprod(x, 0), lax.cummax(x, 0), lax.cummin(x, 0)))
        ),
        "`jnp.cumsum` along members in a `lax.scan` of rounds": Row(
            outside(
                lambda x: lax.scan(
                    lambda c, _: (c + jnp.mean(jnp.cumsum(x * c, 0)), c), jnp.ones(()), length=3
                )
            )
        ),
        "`jnp.roll` along members, differentiated": Row(
            outside(jax.value_and_grad(lambda x: jnp.sum((x - jnp.roll(x, 1, 0)) ** 2)))
        ),
        "a reduction of `x[1:] - x[:-1]`, differentiated": Row(
            outside(jax.value_and_grad(lambda x: jnp.sum((x[1:] - x[:-1]) ** 2)))
        ),
        "`jnp.diff` of members as a result, differences of differences": Row(
            outside(lambda x: (jnp.diff(x, axis=0), jnp.diff(x, n=2, axis=0)))
        ),
        "`jnp.convolve` of members, `\"same\"` and `\"valid\"`, differentiated": Row(
            outside(
                jax.value_and_grad(
                    lambda x: jnp.sum(jnp.convolve(x[:, 0, 0], jnp.ones(3), "same") ** 2)
                    - jnp.sum(jnp.convolve(x[:, 1, 0], jnp.arange(3.0), "valid") ** 2)
                )
            )
        ),
        "`jnp.convolve` of members, `\"full\"`": Row(
            outside(lambda x: jnp.convolve(x[:, 0, 0], jnp.ones(3)))
        ),
        "`lax.reduce_window` along members with stride 1": Row(
            outside(lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1, 1), (1, 1, 1), "SAME"))
        ),
        "`jnp.histogram`, `bincount` of members": Row(
            outside(
                lambda x, i: (jnp.histogram(x, bins=4)[0], jnp.bincount(i, length=3)), more.IDS % 3
            )
        ),
        "`jnp.median` along members, of less than 1 MiB": Row(
            outside(lambda x: jnp.median(x, 0))
        ),
        "`jnp.linalg.qr`, `svd` of members as rows": Row(
            outside(
                lambda x: (
                    jnp.linalg.qr(x[:, 0, :2]), jnp.linalg.svd(x[:, 0], full_matrices=False)
                )
            )
        ),
        "`jnp.linalg.lstsq`, `pinv` of members as rows": Row(
            outside(
                lambda x: (jnp.linalg.lstsq(x[:, 0], x[:, 1, 0])[0], jnp.linalg.pinv(x[:, 0]))
            )
        ),
        "`lax.associative_scan` along members": Row(
            outside(lambda x: lax.associative_scan(jnp.add, x))
        ),
        "`jax.nn.softmax` along members": Row(outside(lambda x: jax.nn.softmax(x, 0))),
        "`jnp.concatenate` of members": Row(outside(lambda x: jnp.concatenate([x, x]))),
    },
    "Types": {
        **{
            f"`{dtype}`": Row(of_dtype(dtype))
            for dtype in (
                "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "int32", "int16",
                "int8", "uint32", "uint8", "bool",
            )
        },
        **{f"`{dtype}` (x64)": Row(of_dtype(dtype), x64=True)
           for dtype in ("float64", "int64", "uint64", "complex128")},
        "`int4`, which `jnp` does not sum": Row(more.four_bits),
        "typed keys": case("keys_placed"),
        "typed keys as results": case("keys_as_results"),
        "`float0` (gradients of integers)": case("float0_of_placed_ints"),
        "arrays of size zero": Row(more.summed(jnp.zeros((N, 0, 3)))),
        "Python scalars as arguments": Row(
            program(lambda ops, s, x: ops.reduce_sum(ops.map_fn(lambda v: v * s, x)), 0.5, X)
        ),
        "NumPy arrays as arguments": Row(program(lambda ops, x: ops.reduce_mean(x), np.asarray(X))),
        "NaN and infinity": Row(more.summed(X.at[2, 0].set(jnp.nan).at[3, 1].set(jnp.inf))),
    },
    "Random numbers": {
        "`jax.random.split(key, n)` outside": Row(
            program(lambda ops, key: ops.map_fn(more.noise, jax.random.split(key, N)), KEY)
        ),
        "`fold_in(key, i)` in a body": case("keys_broadcast"),
        "keys that a body closes over": case("keys_closed_over"),
        "`jax.vmap` over keys": case("keys_batched"),
        "draws on the server, of all members": Row(
            program(lambda ops, key: ops.reduce_sum(jax.random.normal(key, (N, 3))), KEY)
        ),
        "`rbg` keys in a body": Row(more.rbg_in_body),
    },
    "Trees": {
        "dicts and `None`": case("none_and_dicts"),
        "named tuples": Row(more.named_tuples),
        "registered dataclasses": case("dataclasses_as_trees"),
        "`flax.struct`": Row(more.flax_struct),
    },
    "Idioms": {
        "federated averaging, weighted, Adam of `optax`": Row(more.fedavg),
        "`flax.linen` and momentum of `optax`": case("flax_and_optax"),
        "`flax.nnx`": case("flax_nnx"),
        "DiLoCo: placed optimizer state in and out": Row(more.diloco),
        "clipped gradients and noise": Row(more.private_sum),
        "k-means": Row(more.k_means),
        "covariance of members": Row(more.covariance),
        "Monte Carlo without inputs": Row(more.monte_carlo),
        "gradient by a learning rate": Row(more.hyperparameters),
        "ensembles: `vmap` over models": Row(
            transformed(functools.partial(jax.vmap, in_axes=(0, None, None)), WS, X, Y)
        ),
        "`jax.debug.print` of a reduced value": Row(more.debug_print_on_server),
    },
}  # fmt: skip

ROWS = {(section, name): row for section, rows in TABLE.items() for name, row in rows.items()}


def cells(row: Row) -> list[str]:
    """Runs a row: what became of it in this process and on each runner."""
    with (
        jax.enable_x64(row.x64),
        # As a user has them; the tests are stricter.
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        fn, args = row.build(bj)
        try:
            want = jax.jit(fn)(*args)
            expected, arguments = row.build(reference)
            check(want, expected(*arguments))
        except Exception as error:
            return [f"fails: {reason(error)}", *["" for _ in RUNNERS]]
        texts, results = ["passed"], []
        for runner in RUNNERS:
            try:
                results.append(bj.run(fn, *args, runner=runner, options=OPTIONS))
                assert_same_types(results[-1], want)
                check(results[-1], want)
                assert_same_bits(results[-1], results[0])
            except Exception as error:
                kind = "refused" if isinstance(error, bj.StagingError) else "fails"
                texts.append(f"{kind}: {reason(error)}")
            else:
                explanation = bj.explain(fn, *args, options=OPTIONS)
                check_explanation(explanation)
                gathered = explanation.facts.gathered_bytes
                texts.append(f"gathered {human_bytes(gathered)}" if gathered else "passed")
        return texts


def check(found, expected) -> None:
    wrong = [row.failure() for row in compare(found, expected) if not row.passed]
    assert not wrong, wrong[0]


def reason(error: Exception) -> str:
    """The first clause of a message, without the place in the file."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = re.sub(r"^\S+:\d+ \(.*?\): ", "", text)
    return re.split(r"[.;:,] | \(", text)[0].replace("|", "\\|")


def markdown(texts: dict[tuple[str, str], list[str]]) -> str:
    """The table, as a file."""
    lines = [
        "# Conformance",
        "",
        "What of JAX works where. Made by `python tests/conformance.py`, which runs each row as a "
        "small",
        f"program of {N} members, with JAX {VERSION}.",
        "",
        "- *passed*: tree, shapes, dtypes and values are right: in this process against the same "
        "program by",
        "  `jax.vmap` and `jnp`, on a runner against `jax.jit`. Both runners give the same bits.",
        "- *gathered*: passed, but members had to be brought together on one machine: the bytes "
        "of all.",
        "- *refused*: an error that says so, before any work starts.",
    ]
    for section, rows in TABLE.items():
        lines += ["", f"## {section}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line([name, *texts[section, name]]) for name in rows]
    return "\n".join(lines) + "\n"


def _line(row) -> str:
    return f"| {' | '.join(row)} |"


def read() -> dict[tuple[str, str], list[str]]:
    """The cells of the table that is kept in the repository."""
    found, section = {}, ""
    for line in TEXT.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(("|  |", "| ---")):
            name, *texts = re.split(r" (?<!\\)\| ", line[2:-2])
            found[section, name] = texts
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PATH.write_text(markdown({key: cells(row) for key, row in ROWS.items()}), encoding="utf-8")
