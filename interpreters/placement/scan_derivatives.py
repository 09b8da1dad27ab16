"""Rewrites reverse-mode derivatives of `cumprod` and `cumlogsumexp` to passes.

JAX differentiates the equations of `lax.associative_scan` of a function of two values instead, and
gives a sum of padded products of all levels of a tree. The derivative of the scan is traced again,
with the same shape. If its equations are those of the program, whatever their order, the program
computes the derivative.

The passes differentiate a scan in two passes (`associative_scans`). Those of `cummax` and `cummin`
are gathered: equal extremes share the derivative in a way that depends on the tree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.interpreters.placement.associative_scans import FEWEST, are_members, same_values
from beamjax.interpreters.placement.rewrites import BlockRewriter, Rewrite
from beamjax.interpreters.program import Atom, Eqn, Var, aval_of
from beamjax.interpreters.rules.by_shard import mapped_by_shard, range_size, reduced_by_shard
from beamjax.interpreters.rules.sharding_rules import TracedShard, default_promotion, shape_of
from beamjax.interpreters.staging.flatten import flatten

Combine = Callable[[Any, Any], Any]

SCANS: dict[str, tuple[Callable[..., Any], Combine]] = {
    "cumprod": (lax.cumprod, lax.mul),
    "cumlogsumexp": (lax.cumlogsumexp, jnp.logaddexp),
}
"""Each scan, and its function of two values."""


def scan_derivatives(rewriter: BlockRewriter, eqn: Eqn) -> Rewrite | None:
    """Rewrites the last sum of the derivative of a scan along the members."""
    if eqn.primitive.name != "add_any" or not rewriter.rewrites.moves:
        return None
    last, aval = rewriter.original(eqn.inputs[1]), aval_of(eqn.outputs[0])
    if last is None or last.primitive.name != "pad" or aval.dtype not in (np.float32, np.float64):
        return None
    axes = [k for k, widths in enumerate(last.params["padding_config"]) if any(widths)]
    if len(axes) != 1 or tuple(map(int, last.params["padding_config"][axes[0]]))[::2] != (0, 1):
        return None
    (axis,) = axes
    for name, (_, combine) in SCANS.items():
        found = _template(name, aval.shape, aval.dtype, axis).match(rewriter.originals, eqn)
        if found is None:
            continue
        block = _block(found[0], axis, rewriter.program.shard_size)
        if block is None or not are_members(rewriter.program, found[:2], axis):
            return None
        scan = _Scan(combine, shape_of(found[0])[axis], block)
        return Rewrite(functools.partial(_along, scan, axis), found)
    return None


def _along(scan: _Scan, axis: int, x: Any, cotangent: Any, *others: Any) -> list[Any]:
    """The derivative of a scan along an axis, and what is added to it."""
    rows, given = (jnp.moveaxis(each, axis, 0) for each in (x, cotangent))
    return [sum(others, jnp.moveaxis(scan.slope(rows, given), 0, axis))]


def _block(x: Atom, axis: int, shard_size: int | None) -> int | None:
    """Members per range, a power of two; None if there would be too many ranges."""
    n = shape_of(x)[axis]
    member = aval_of(x).dtype.itemsize * math.prod(shape_of(x)) // n
    size = None if shard_size is None else shard_size & -shard_size
    return range_size(n, member, member, size, fewest=FEWEST)


# --- the equations of JAX


@dataclass(frozen=True)
class _Template:
    """The equations of a derivative.

    Attributes:
      makers: the equation of each value.
      arguments: the members and the cotangents of the results.
      terms: the values that it sums up.
    """

    makers: Mapping[Var, Eqn]
    arguments: Sequence[Var]
    terms: Sequence[Atom]

    def match(self, makers: Mapping[Var, Eqn], eqn: Eqn) -> list[Atom] | None:
        """What the program has for the arguments, if its equations end with such a derivative.

        Derivatives that the program adds to it before follow.
        """
        if not self.terms:
            return None
        env: dict[Var, Atom] = {}
        atom: Atom = eqn.outputs[0]
        for term in reversed(self.terms[1:]):
            maker = makers.get(atom) if isinstance(atom, Var) else None
            if maker is None or maker.primitive.name != "add_any":
                return None
            if not self.has(term, maker.inputs[1], makers, env):
                return None
            atom = maker.inputs[0]
        others, first = [], atom
        maker = makers.get(atom) if isinstance(atom, Var) else None
        if maker is not None and maker.primitive.name == "add_any":
            others, first = [maker.inputs[0]], maker.inputs[1]
        if not self.has(self.terms[0], first, makers, env):
            return None
        if not all(var in env for var in self.arguments):
            return None
        return [*(env[var] for var in self.arguments), *others]

    def has(self, term: Atom, atom: Atom, makers: Mapping[Var, Eqn], env: dict[Var, Atom]) -> bool:
        return same_values(term, atom, self.makers, makers, env, self.arguments)


@functools.lru_cache(maxsize=64)
def _template(name: str, shape: tuple[int, ...], dtype: Any, axis: int) -> _Template:
    scan, _ = SCANS[name]
    x = jax.ShapeDtypeStruct(shape, dtype)

    def slope(x: Any, cotangent: Any) -> Any:
        return jax.vjp(functools.partial(scan, axis=axis), x)[1](cotangent)[0]

    with default_promotion():
        flat = flatten(jax.make_jaxpr(slope)(x, x))
    makers: dict[Var, Eqn] = {var: eqn for eqn in flat.eqns for var in eqn.outputs}
    terms: list[Atom] = []
    (atom,) = flat.outputs
    while isinstance(atom, Var) and atom in makers and makers[atom].primitive.name == "add_any":
        terms.insert(0, makers[atom].inputs[1])
        atom = makers[atom].inputs[0]
    found = bool(terms) and isinstance(atom, Var) and not flat.constants
    return _Template(makers, flat.arguments, [atom, *terms] if found else [])


# --- passes


@dataclass(frozen=True)
class _Scan:
    """A scan of n members along axis 0, in ranges of `block` members, a power of two."""

    combine: Combine
    n: int
    block: int

    def slope(self, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        """The cotangents of the members, for those of the results."""
        ranges = -(-self.n // self.block)

        def table(shard: TracedShard, x: Any) -> tuple[Any, Any]:
            rows = lax.iota(np.dtype("int32"), ranges) - shard.start // self.block
            totals = self.totals(x)
            mine = (rows >= 0) & (rows < len(totals))
            return jnp.take(totals, rows, axis=0, mode="clip"), mine

        def before(totals: Any) -> Any:
            """What comes before each range; ones for the first."""
            ends = lax.associative_scan(self.combine, totals)
            return jnp.concatenate([jnp.ones_like(ends[:1]), ends[:-1]])

        def scanned(shard: TracedShard, x: Any, starts: Any) -> Any:
            first = shard.start // self.block
            rows = first + lax.iota(np.dtype("int32"), -(-shard.size // self.block))
            found = self.results(x, jnp.take(starts, rows, axis=0, mode="clip"), rows)
            return found[: shard.size]

        def of_starts(shard: TracedShard, x: Any, given: Any, starts: Any) -> tuple[Any, Any]:
            given = shard.masked(given, 0)
            (slopes,) = jax.vjp(lambda starts: scanned(shard, x, starts), starts)[1](given)
            return slopes, jnp.ones(ranges, bool)

        def of_members(shard: TracedShard, x: Any, given: Any, starts: Any, ends: Any) -> Any:
            given = shard.masked(given, 0)
            rows = shard.start // self.block + lax.iota(
                np.dtype("int32"), -(-shard.size // self.block)
            )
            both = lambda x: (scanned(shard, x, starts), self.totals(x))
            found = jnp.take(ends, rows, axis=0, mode="fill", fill_value=0)
            return jax.vjp(both, x)[1]((given, found))[0]

        totals = reduced_by_shard(table, x, block=self.block)
        starts, back = jax.vjp(before, totals)
        kinds: dict[str, Any] = {"block": self.block, "members": 2}
        slopes = reduced_by_shard(of_starts, x, cotangent, starts, **kinds, reducer="sum")
        return mapped_by_shard(of_members, x, cotangent, starts, *back(slopes), **kinds)

    def split(self, x: Any) -> Any:
        """The ranges of a shard, of which the last may be filled up."""
        rows = np.arange(-(-len(x) // self.block) * self.block)
        whole = jnp.take(x, np.minimum(rows, len(x) - 1), axis=0)
        return whole.reshape(-1, self.block, *x.shape[1:])

    def totals(self, x: Any) -> Any:
        """The total of each range."""
        x = self.split(x)
        while x.shape[1] > 1:
            x = self.combine(x[:, ::2], x[:, 1::2])
        return x[:, 0]

    def results(self, x: Any, starts: Any, ranges: Any) -> Any:
        """The results of a shard, for what comes before each of its ranges."""

        def after(x: Any) -> Any:
            """The scan of ranges (ranges, size, ...), as `lax.associative_scan` computes it."""
            size = x.shape[1]
            odd = None if size == 1 else after(self.combine(x[:, ::2], x[:, 1::2]))
            left = starts[:, None]
            if odd is not None:
                left = jnp.concatenate([left, odd[:, :-1]], 1)
            even = self.combine(left, x[:, ::2])
            # Nothing comes before the first range.
            first = (ranges == 0).reshape(-1, *(1 for _ in even.shape[1:]))
            first &= (np.arange(even.shape[1]) == 0).reshape(-1, *(1 for _ in even.shape[2:]))
            even = jnp.where(first, x[:, ::2], even)
            if odd is None:
                return even
            return jnp.stack([even, odd], 2).reshape(x.shape)

        found = after(self.split(x))
        return found.reshape(-1, *x.shape[1:])
