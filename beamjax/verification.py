"""`verify`: compares the result on a runner with the result of `jax.jit`, leaf by leaf."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from beamjax import _compat, execution
from beamjax._text import aligned
from beamjax.bodies.load import unwrap, wrap
from beamjax.call import by_position, runner_name
from beamjax.errors import OptionsError, VerificationError
from beamjax.interpreters.staging.arguments import Argument, flatten_call
from beamjax.numerics.ulp import NAN_DISTANCE, real_parts, ulp_distance, unsigned_difference
from beamjax.ops.keyed import Keyed
from beamjax.ops.leaves import name_of
from beamjax.sources.streams.chunks import members_of
from beamjax.sources.tables.keyed_table import KeyedTable

ADVICE = (
    "A runner sums floats in another order than jit. If the difference is of the size of rounding, "
    "give verify a larger rtol or atol; if you are not sure, verify again in float64 "
    "(jax_enable_x64), where rounding shrinks and errors do not. beamjax.explain(fn, *args) shows "
    "the step that each result comes from."
)


@dataclass(frozen=True)
class Row:
    """How one leaf of a runner's result compares with that of `jax.jit`.

    Attributes:
      path: the path of the leaf in the result, as `jax.tree_util.keystr` writes it.
      dtype: the name of the dtype, as JAX prints it.
      shape: the shape of the leaf.
      bits_equal: whether all bits are the same.
      worst_ulp: the largest distance of two elements in representable numbers; None for dtypes
        other than floats.
      worst_difference: the largest absolute difference of two elements; inf if only one is NaN.
      worst_index: the index of that element, or None if there is no difference.
      tolerance: the largest absolute difference that passes.
      found: the runner's element at `worst_index`, as text.
      expected: the element of `jax.jit` at `worst_index`, as text.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    bits_equal: bool
    worst_ulp: int | None
    worst_difference: float
    worst_index: tuple[int, ...] | None
    tolerance: float
    found: str = ""
    expected: str = ""

    @property
    def passed(self) -> bool:
        """Whether the leaf is within its tolerance."""
        return self.worst_difference <= self.tolerance

    def cells(self) -> tuple[str, ...]:
        """The row as text, with a cell for each of `HEADINGS`."""
        return (
            f"result{self.path}",
            f"{self.dtype}[{','.join(map(str, self.shape))}]",
            "equal" if self.bits_equal else "differ",
            _ulp_text(self.worst_ulp),
            f"{self.worst_difference:.3g}",
            f"{self.tolerance:.3g}",
            "ok" if self.passed else "FAILED",
        )

    def failure(self) -> str:
        """One line about the worst element."""
        where = f"result{self.path}" + (str(list(self.worst_index)) if self.worst_index else "")
        return f"{where}: found {self.found}, expected {self.expected}"


def _ulp_text(ulp: int | None) -> str:
    if ulp is None:
        return "-"
    return "NaN" if ulp == NAN_DISTANCE else str(ulp)


HEADINGS = ("leaf", "type", "bits", "ULP", "difference", "allowed", "")


@dataclass(frozen=True)
class VerificationReport:
    """How the result on a runner compares with that of `jax.jit`; `print` shows it as a table.

    Attributes:
      program: the name of the function.
      runner: the name of the runner.
      rows: a `Row` for each leaf of the result.
    """

    program: str
    runner: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every leaf is within its tolerance."""
        return all(row.passed for row in self.rows)

    @property
    def headline(self) -> str:
        """One line that says how many leaves have equal bits and how many failed."""
        same = sum(row.bits_equal for row in self.rows)
        failed = sum(not row.passed for row in self.rows)
        leaves = "1 leaf" if len(self.rows) == 1 else f"{len(self.rows)} leaves"
        verdict = f"{failed} past the tolerance" if failed else "all within the tolerance"
        return (
            f"{self.program} on {self.runner} against jit: {leaves}, "
            f"{same} with equal bits, {verdict}"
        )

    def __str__(self) -> str:
        table = aligned([HEADINGS, *(row.cells() for row in self.rows)])
        return "\n".join([self.headline, *(f"  {line}" for line in table)])

    def _repr_html_(self) -> str:
        rows = [f"<tr>{''.join(f'<th>{name}</th>' for name in HEADINGS)}</tr>"]
        for row in self.rows:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells())
            rows.append(
                f"<tr>{cells}</tr>" if row.passed else f'<tr style="color:#c00">{cells}</tr>'
            )
        return f"<p>{html.escape(self.headline)}</p><table>{''.join(rows)}</table>"


@by_position
def verify(
    fn: Callable[..., Any],
    *args: Any,
    runner: Any = "DirectRunner",
    options: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> VerificationReport:
    """Runs a function on a runner and under `jax.jit`, and compares the results.

    A float leaf passes if every element is within `atol + rtol * max(|x|)`, where `max(|x|)` is the
    largest finite magnitude in the leaf as `jax.jit` computes it: the error of a sum in another
    order grows with that, not with the size of each element. Integers, bools and keys must be
    equal. NaN equals NaN, and an infinity equals only itself.

    Args:
      fn: as for `run`.
      *args: as for `run`. For `jax.jit`, sources are read completely into the memory of this
        process.
      runner: as for `run`.
      options: as for `run`.
      rtol: the relative tolerance of float leaves, >= 0; by default `eps ** (2/3)` of the leaf's
        dtype: 2.4e-5 for float32, 3.7e-11 for float64, 0.039 for bfloat16.
      atol: the absolute tolerance of float leaves, >= 0; by default the smallest normal number of
        the leaf's dtype.

    Returns:
      A `VerificationReport` with a row for each leaf of the result. `print` shows it as a table.

    Raises:
      VerificationError: a leaf differs by more than its tolerance, or the trees, shapes or dtypes
        differ.
      OptionsError: a tolerance is negative.
      BeamjaxError: any error that `run` raises.
    """
    for tolerance, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise OptionsError(f"{tolerance}: found {value!r}, expected a number >= 0, or None")
    result = execution.run(fn, *args, runner=runner, options=options)
    expected = jax.jit(fn)(*whole_arguments(fn, args))
    result, expected = _by_key(result), _by_key(expected)
    name = runner_name(runner)
    rows = compare(result, expected, rtol=rtol, atol=atol)
    report = VerificationReport(name_of(fn), name, rows)
    if not report.ok:
        failures = "\n".join(row.failure() for row in rows if not row.passed)
        error = VerificationError(f"{report}\n{failures}\n{ADVICE}")
        error.report = report
        raise error
    return report


def _by_key(result: Any) -> Any:
    """A result with arrays in place of each `Keyed` and `KeyedTable`."""

    def arrays(node: Any) -> Any:
        if isinstance(node, Keyed):
            return node.reduced()
        return node.arrays() if isinstance(node, KeyedTable) else node

    return jax.tree_util.tree_map(arrays, result, is_leaf=lambda node: isinstance(node, Keyed))


def whole_arguments(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Arguments of `run` as `jax.jit` takes them: arrays in place of the leaves of sources."""
    call = flatten_call(fn, args)
    return call.restore(_whole(call.arguments))


def _whole(arguments: Sequence[Argument]) -> list[Any]:
    read: dict[int, list[np.ndarray]] = {}
    values = []
    for argument in arguments:
        source = argument.value
        if not argument.is_source:
            values.append(source)
            continue
        if id(source) not in read:
            read[id(source)] = members_of(source, bool(_compat.config.jax_enable_x64))
        raw = jnp.asarray(read[id(source)][argument.leaf])
        values.append(wrap(raw, source.leaves[argument.leaf].key_impl))
    return values


def compare(
    result: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None
) -> tuple[Row, ...]:
    """Compares two trees of arrays, with a row for each leaf; raises if their structures differ."""
    left, result_tree = jax.tree_util.tree_flatten_with_path(result)
    expected_tree: Any
    right, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    types = [{jax.tree_util.keystr(p): _type(x) for p, x in side} for side in (left, right)]
    wrong = [
        f"result{path}: found {types[0].get(path, 'no leaf')}, "
        f"expected {types[1].get(path, 'no leaf')}"
        for path in types[1] | types[0]
        if types[0].get(path) != types[1].get(path)
    ]
    if not wrong and result_tree != expected_tree:
        wrong = [f"result: found the tree {result_tree}, expected {expected_tree}"]
    if wrong:
        raise VerificationError(
            "\n".join(wrong)
            + "\nThe runner's answer has another structure than that of jit, which "
            "is an error in beamjax: please report it, with beamjax.explain(fn, *args)"
        )
    return tuple(
        compare_leaf(jax.tree_util.keystr(path), a, b, rtol=rtol, atol=atol)
        for (path, a), (_, b) in zip(left, right, strict=True)
    )


def _type(x: Any) -> str:
    name = "float0" if x.dtype == jax.dtypes.float0 else str(x.dtype)
    return f"{name}[{','.join(map(str, x.shape))}]"


def compare_leaf(
    path: str, result: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None
) -> Row:
    """Compares two arrays of one shape and dtype; see `verify`."""
    name = _type(expected).partition("[")[0]
    shape = tuple(expected.shape)
    if name == "float0":
        return Row(path, name, shape, True, None, 0, None, 0)
    a, b = np.asarray(unwrap(result)), np.asarray(unwrap(expected))
    inexact = jnp.issubdtype(b.dtype, np.inexact)
    ulp, tolerance = None, 0.0
    if inexact:
        ulp = int(ulp_distance(a, b).max(initial=0))
        tolerance = float_tolerance(b, rtol=rtol, atol=atol)
    difference = absolute_difference(a, b)
    worst = difference.max(initial=0).item()
    index, texts = None, ("", "")
    if worst > 0:
        index = tuple(map(int, np.unravel_index(np.argmax(difference), b.shape)))
        texts = (str(a[index]), str(b[index]))
    bits = a.tobytes() == b.tobytes()
    return Row(path, name, shape, bits, ulp, worst, index, tolerance, *texts)


def float_tolerance(
    expected: np.ndarray, *, rtol: float | None = None, atol: float | None = None
) -> float:
    """The largest difference from `expected` that passes: `atol + rtol * max(|expected|)`."""
    # Elements that are not finite do not count.
    parts = real_parts(expected)
    limits = ml_dtypes.finfo(parts.dtype)
    relative = float(limits.eps) ** (2 / 3) if rtol is None else rtol
    absolute = float(limits.smallest_normal) if atol is None else atol
    with np.errstate(all="ignore"):
        size = np.abs(parts.astype(np.float64))
    return absolute + relative * float(size.max(initial=0, where=np.isfinite(size)))


def absolute_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| for each element; 0 for two NaNs, inf for one NaN, and for different infinities."""
    # It is float64 for floats and uint64, which is exact, for integers and bools. For complex
    # numbers it is the larger difference of the real and imaginary parts.
    if not jnp.issubdtype(a.dtype, np.inexact):
        kind = np.uint64 if a.dtype.kind in "bu" else np.int64
        return unsigned_difference(a.astype(kind), b.astype(kind))
    x, y = (real_parts(v).astype(np.float64) for v in (a, b))
    with np.errstate(all="ignore"):
        difference = np.abs(x - y)
        difference[np.isnan(difference)] = math.inf
        difference[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
    return difference.max(axis=-1)
