"""Rewrites a sum over members of per-member products to one product that contracts over them.

The gradient of a loss by weights that all members share is such a sum: each member computes the
outer product of its input and its cotangent, as large as the weights, and these are added up. In

    ps = bj_map[x, y -> dot_general x y] xs ys      ps: n times the size of the weights
    s = bj_reduce_sum ps

the map returns the factors instead, and one product contracts over the members as well:

    us, vs = bj_map[x, y -> x, y] xs ys
    s = dot_general[contracting the members] us vs

No member then needs memory for a product of its own. XLA does this by itself only for a shard
without padding that is computed all at once.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from beamjax import _compat
from beamjax.bodies.jaxprs import equations, evaluate
from beamjax.interpreters.program import Atom, Eqn, FlatBlock, FlatProgram, Var, aval_of
from beamjax.interpreters.staging.flatten import CALLED
from beamjax.interpreters.staging.simplify import prune
from beamjax.numerics.reducers import REDUCERS
from beamjax.ops.primitives import REDUCE_PRIMITIVES, size_p, trace_body

_CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call".split())
_REMATS = frozenset("remat remat2 checkpoint".split())
_PRODUCTS = frozenset("dot_general conv_general_dilated".split())
_REDUCTIONS = {
    REDUCE_PRIMITIVES[name]: reducer
    for name, reducer in REDUCERS.items()
    if reducer.operation == "sum"
}


def contract_sums(flat: FlatProgram) -> FlatProgram:
    """The same program with contractions in place of sums and means of per-member products."""
    # The flat program is shown by `explain` as well, so it stays as it is.
    flat = flat.copied()
    readers = collections.Counter(atom for atom in flat.reads() if isinstance(atom, Var))
    if _contract(flat, readers):
        prune(flat)
    return flat


def _contract(block: FlatBlock, readers: collections.Counter[Var]) -> bool:
    changed = sum(_contract(inner, readers) for eqn in block.eqns for inner in eqn.blocks) > 0
    maps = {var: eqn for eqn in block.eqns if eqn.primitive.name == "bj_map" for var in eqn.outputs}
    reductions: dict[Eqn, list[Eqn]] = {}
    for eqn in block.eqns:
        if eqn.primitive not in _REDUCTIONS:
            continue
        var = _members(eqn)
        mapped = maps.get(var)
        # Another reader of the members' values needs them in any case.
        if mapped and _can_be_traced(mapped) and readers[var] == 1 and _is_linear(eqn):
            reductions.setdefault(mapped, []).append(eqn)
    new: dict[Eqn, list[Eqn]] = {}
    for mapped, reduced in reductions.items():
        # Tracing a body takes long compared with looking through it.
        if any(map(_is_product, equations(mapped.params["jaxpr"]))):
            new.update(_contracted(mapped, reduced))
    block.eqns[:] = itertools.chain.from_iterable(new.get(eqn, [eqn]) for eqn in block.eqns)
    return changed or bool(new)


def _can_be_traced(mapped: Eqn) -> bool:
    """Whether a body may be traced anew, which would repeat its effects and lose its mesh."""
    return not mapped.effects and mapped.params["mesh"] is None


def _members(reduction: Eqn) -> Var:
    (var,) = reduction.inputs
    assert isinstance(var, Var), reduction  # A literal is a scalar, which has no members.
    return var


def _is_linear(reduction: Eqn) -> bool:
    """Whether a sum or a mean may be computed as a contraction."""
    dtype = _members(reduction).aval.dtype
    if not jax.numpy.issubdtype(dtype, np.floating):
        return False
    # The sum of a narrow dtype may be infinite where the mean is not.
    return not _REDUCTIONS[reduction.primitive].divides or dtype.itemsize >= 4


def _is_product(eqn: Any) -> bool:
    """Whether an equation may be a product; `jnp.outer` multiplies entry by entry."""
    name = eqn.primitive.name
    return name in _PRODUCTS or (name == "mul" and eqn.outvars[0].aval.ndim > 1)


def _contracted(mapped: Eqn, reductions: Sequence[Eqn]) -> dict[Eqn, list[Eqn]]:
    """The equations that replace a map and reductions of its results; empty if all stay."""
    closed, served = mapped.params["jaxpr"], mapped.params["num_broadcast"]
    reduced = {mapped.outputs.index(_members(eqn)): eqn for eqn in reductions}
    sums: dict[int, _Sum] = {}
    # New results of the map: two factors for each product of each sum.
    factors: list[Any] = []

    def body(*args: Any) -> list[Any]:
        outs = _evaluate(closed, args)
        # A factor that is a server value has no members to contract over.
        same_for_all = {id(x) for x in args[:served]}
        for k, x in enumerate(outs):
            if k in reduced and isinstance(x, _Sum):
                own = [factor for product in x.products for factor in product.rows()]
                if not any(id(factor) in same_for_all for factor in own):
                    sums[k] = x
                    factors.extend(own)
        return [*(_value(x) for k, x in enumerate(outs) if k not in sums), *factors]

    traced, consts = trace_body(body, closed.in_avals)
    # An array that the new body closes over would have to become an operand: such bodies stay.
    if not sums or consts:
        return {}
    n = mapped.params["n"]
    rows = [
        Var(f"{mapped.outputs[0].name}_{k}", jax.core.ShapedArray((n, *x.shape), x.dtype))
        for k, x in enumerate(factors)
    ]
    others = [var for k, var in enumerate(mapped.outputs) if k not in sums]
    params = {**mapped.params, "jaxpr": traced}
    new = {mapped: [replace(mapped, params=params, outputs=[*others, *rows])]}
    unused = iter(rows)
    for k, sum_ in sums.items():
        own_rows = [(next(unused), next(unused)) for _ in sum_.products]
        new[reduced[k]] = _Equations(reduced[k], mapped).of_sum(sum_, own_rows)
    return new


class _Equations:
    """Builds the equations that replace one reduction."""

    def __init__(self, reduction: Eqn, mapped: Eqn):
        self.reduction = reduction
        self.members = {key: mapped.params[key] for key in ("placement", "n")}
        self.eqns: list[Eqn] = []

    def of_sum(self, sum_: _Sum, rows: Sequence[tuple[Var, Var]]) -> list[Eqn]:
        """Contracts the rows of each product over the members, and adds the results up."""
        pairs = zip(sum_.products, rows, strict=True)
        terms = [self.contraction(product, *own) for product, own in pairs]
        total = functools.reduce(lambda a, b: self.add(lax.add_p, {}, a, b), terms)
        if _REDUCTIONS[self.reduction.primitive].divides:
            # mean = sum / n, as the reduction itself is defined.
            size = self.add(size_p, self.members)
            dtype = {"new_dtype": total.aval.dtype, "weak_type": False, "sharding": None}
            size = self.add(lax.convert_element_type_p, dtype, size)
            self.add(lax.div_p, {}, total, size)
        # The last equation defines what the reduction did, so readers stay as they are.
        self.eqns[-1].outputs = self.reduction.outputs
        return self.eqns

    def contraction(self, product: _Product, left: Var, right: Var) -> Var:
        if product.primitive is lax.dot_general_p:
            (lhs, rhs), (lhs_batch, rhs_batch) = product.params["dimension_numbers"]
            # dot_general[((1), (0)), ((), ())] x y  of members becomes
            # dot_general[((0, 2), (0, 1)), ((), ())] xs ys, whose axis 0 are the members.
            contracting = ((0, *_after(lhs)), (0, *_after(rhs)))
            dims = (contracting, (_after(lhs_batch), _after(rhs_batch)))
            params = {**product.params, "dimension_numbers": dims}
            x = self.add(product.primitive, params, left, right)
        else:
            # A convolution contracts the features of its operands. Those of a member's factors are
            # one, so the members take their axis: the sum of n convolutions is one convolution with
            # n features.
            placed = zip((left, right), product.unit_axes(), strict=True)
            operands = [self.with_members_along(axis, var) for var, axis in placed]
            x = self.add(product.primitive, product.params, *operands)
        for primitive, params, literals in product.then:
            x = self.add(primitive, params, x, *literals)
        return x

    def with_members_along(self, axis: int, var: Var) -> Var:
        others = range(1, var.aval.ndim)
        order = (*others[:axis], 0, *others[axis:])
        return self.add(lax.transpose_p, {"permutation": order}, var) if axis else var

    def add(self, primitive: _compat.Primitive, params: dict[str, Any], *inputs: Atom) -> Var:
        """Appends an equation of one result, which it returns."""
        avals = map(aval_of, inputs)
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        (aval,) = jax.eval_shape(lambda *args: _compat.bind(primitive, args, params), *types)
        name = f"{self.reduction.outputs[0].name}_{len(self.eqns)}"
        out = Var(name, jax.core.ShapedArray(aval.shape, aval.dtype))
        self.eqns.append(Eqn(primitive, params, list(inputs), [out], self.reduction.line))
        return out


def _after(axes: Sequence[int]) -> tuple[int, ...]:
    """The axes of one member's value, where the members are in front."""
    return tuple(axis + 1 for axis in axes)


# --- tracing with products
#
# The body of the map is traced anew, with a `_Sum` in place of the result of each product.
# Equations that are linear in it (transposes, sums, scaling by one number) are noted in the `_Sum`;
# all others compute its value. If a result of the body is still a `_Sum` at the end, the map can
# return the factors of its products.


@dataclass(eq=False)
class _Product:
    """A product of two arrays of one member, and equations that are applied to its result."""

    # `dot_general`, or `conv_general_dilated` with one feature to contract.
    primitive: _compat.Primitive
    params: dict[str, Any]
    factors: tuple[Any, Any]
    # Primitives, their parameters, and their operands after the first.
    then: tuple[tuple[_compat.Primitive, dict[str, Any], tuple[Any, ...]], ...] = ()

    def value(self) -> Any:
        (x,) = _compat.bind(self.primitive, self.factors, self.params)
        for primitive, params, literals in self.then:
            (x,) = _compat.bind(primitive, [x, *(atom.val for atom in literals)], params)
        return x

    def followed_by(self, eqn: Any, *literals: Any) -> _Product:
        return replace(self, then=(*self.then, (eqn.primitive, eqn.params, literals)))

    def transposed(self, eqn: Any) -> _Product:
        """The product with transposed result: of swapped factors, if that does it."""
        if self.primitive is lax.dot_general_p and not self.then:
            contracting, (left, right) = self.params["dimension_numbers"]
            batch = len(left)
            free = [x.ndim - batch - len(c) for x, c in zip(self.factors, contracting, strict=True)]
            axes = range(batch, batch + sum(free))
            # dot_general x y has the axes (batch, free of x, free of y). If a transpose swaps the
            # last two groups, the product of y and x gives the same without a transpose of the
            # large result.
            swapped = (*range(batch), *axes[free[0] :], *axes[: free[0]])
            if tuple(eqn.params["permutation"]) == swapped:
                precision = self.params["precision"]
                params = {
                    **self.params,
                    "dimension_numbers": (contracting[::-1], (right, left)),
                    "precision": precision[::-1] if isinstance(precision, tuple) else precision,
                }
                return replace(self, params=params, factors=self.factors[::-1])
        return self.followed_by(eqn)

    def scaled(self, op: Callable[[Any, Any], Any], number: Any) -> _Product:
        """Scales the smaller factor, which costs less than scaling the result."""
        k = int(self.factors[1].size < self.factors[0].size)
        factors = list(self.factors)
        factors[k] = op(factors[k], lax.broadcast_in_dim(number, factors[k].shape, ()))
        return replace(self, factors=tuple(factors))

    def unit_axes(self) -> tuple[int, int]:
        """The axes of size 1 along which a convolution contracts its factors."""
        numbers = self.params["dimension_numbers"]
        return numbers.lhs_spec[1], numbers.rhs_spec[1]

    def rows(self) -> list[Any]:
        """The factors of one member; the members replace a convolution's axes of size 1."""
        if self.primitive is lax.dot_general_p:
            return list(self.factors)
        pairs = zip(self.factors, self.unit_axes(), strict=True)
        return [lax.squeeze(x, (axis,)) for x, axis in pairs]


@dataclass(eq=False)
class _Sum:
    """A sum of products."""

    products: list[_Product]

    @functools.cached_property
    def value(self) -> Any:
        return functools.reduce(lax.add, (product.value() for product in self.products))


@dataclass(eq=False)
class _Spread:
    """The result of an equation that broadcasts an array along its other axes."""

    # `jnp.outer` multiplies two of these: x[:, None] * y[None, :].
    array: Any  # without axes of size 1
    axes: tuple[int, ...]  # of the result, one for each axis of the array
    eqn: Any
    operand: Any

    @functools.cached_property
    def value(self) -> Any:
        return _compat.bind(self.eqn.primitive, [_value(self.operand)], self.eqn.params)[0]


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Sum | _Spread) else x


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    def apply(eqn: Any, inputs: list[Any]) -> list[Any]:
        with _compat.context_of(eqn):
            return _apply(eqn, inputs)

    constants = getattr(closed, "consts", ())  # remat holds an open jaxpr, which has none.
    return evaluate(closed, constants, args, apply, lambda atom: atom.val)


def _apply(eqn: Any, inputs: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in _CALLS | _REMATS:
        inner = next(eqn.params[key] for key in CALLED if key in eqn.params)
        if name in _REMATS:
            # XLA must not merge what it recomputes with the first computation.
            inputs = lax.optimization_barrier(list(map(_value, inputs)))
        return _evaluate(inner, inputs)
    result = _RULES[name](eqn, *inputs) if name in _RULES else None
    if result is not None:
        return [result]
    return _compat.bind(eqn.primitive, list(map(_value, inputs)), eqn.params)


# A rule gives the result of an equation as a `_Sum` or `_Spread`, or None for its value.


def _dot_general(eqn: Any, lhs: Any, rhs: Any) -> _Sum | None:
    lhs, rhs = _value(lhs), _value(rhs)
    out = eqn.outvars[0].aval
    # Where the product is smaller than its factors, such as x . y, it is better to add products up.
    if not jax.numpy.issubdtype(out.dtype, np.floating) or out.size <= lhs.size + rhs.size:
        return None
    return _Sum([_Product(eqn.primitive, eqn.params, (lhs, rhs))])


def _convolution(eqn: Any, lhs: Any, rhs: Any) -> _Sum | None:
    product = _Product(eqn.primitive, eqn.params, (_value(lhs), _value(rhs)))
    groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    axes = zip(product.factors, product.unit_axes(), strict=True)
    # Only a convolution that contracts one feature has room for the members.
    if groups != (1, 1) or any(x.shape[axis] != 1 for x, axis in axes):
        return None
    return _Sum([product])


def _shaped(eqn: Any, x: Any, *sizes: Any) -> _Sum | None:
    if not isinstance(x, _Sum) or sizes:
        return None
    return _Sum([product.followed_by(eqn) for product in x.products])


def _transpose(eqn: Any, x: Any) -> _Sum | None:
    return (
        _Sum([product.transposed(eqn) for product in x.products]) if isinstance(x, _Sum) else None
    )


def _converted(eqn: Any, x: Any) -> _Sum | None:
    dtype = eqn.params["new_dtype"]
    if not isinstance(x, _Sum) or not jax.numpy.issubdtype(dtype, np.floating):
        return None
    before = eqn.invars[0].aval.dtype
    # A narrower dtype rounds each product, and the sum of rounded products is another number.
    if np.promote_types(before, dtype) != dtype:
        return None
    # The contraction itself must use the wider dtype, because it adds up.
    products = [
        replace(p, params={**p.params, "preferred_element_type": np.dtype(dtype)})
        for p in x.products
    ]
    return _Sum(products)


def _broadcast(eqn: Any, x: Any, *sizes: Any) -> _Sum | _Spread | None:
    if sizes:
        return None
    if isinstance(x, _Sum):
        # A broadcast that only inserts axes of size 1 is linear; one that repeats values is not
        # noted.
        same_size = math.prod(eqn.params["shape"]) == eqn.invars[0].aval.size
        return _shaped(eqn, x) if same_size else None
    shape = eqn.invars[0].aval.shape
    if isinstance(x, _Spread):
        array, axes = x.array, x.axes
    else:
        axes = tuple(axis for axis, size in enumerate(shape) if size != 1)
        array = lax.reshape(x, [shape[axis] for axis in axes])
    places = eqn.params["broadcast_dimensions"]
    return _Spread(array, tuple(int(places[axis]) for axis in axes), eqn, x)


def _padded(eqn: Any, x: Any, fill: Any) -> _Sum | None:
    literal = eqn.invars[1]
    # Padding with zeros is linear.
    if not isinstance(x, _Sum) or not isinstance(literal, _compat.Literal) or literal.val != 0:
        return None
    return _Sum([product.followed_by(eqn, literal) for product in x.products])


def _added(eqn: Any, x: Any, y: Any) -> _Sum | None:
    if isinstance(x, _Sum) and isinstance(y, _Sum):
        return _Sum([*x.products, *y.products])
    return None


def _divided(eqn: Any, x: Any, y: Any) -> _Sum | None:
    return _scaled(eqn, x, y, lax.div)


def _multiplied(eqn: Any, x: Any, y: Any) -> _Sum | None:
    if isinstance(x, _Spread) and isinstance(y, _Spread) and x.axes and y.axes:
        return _outer(eqn, x, y)
    return _scaled(eqn, y, x, lax.mul) if isinstance(y, _Sum) else _scaled(eqn, x, y, lax.mul)


def _scaled(eqn: Any, x: Any, y: Any, op: Callable[[Any, Any], Any]) -> _Sum | None:
    number = y.array if isinstance(y, _Spread) else y
    if not isinstance(x, _Sum) or isinstance(number, _Sum) or np.ndim(number) != 0:
        return None
    dtype = eqn.outvars[0].aval.dtype
    # Scaling a narrower factor would round what the program computes in the dtype of the product.
    if any(factor.dtype != dtype for product in x.products for factor in product.factors):
        return None
    number = lax.convert_element_type(number, dtype)
    return _Sum([product.scaled(op, number) for product in x.products])


def _outer(eqn: Any, x: _Spread, y: _Spread) -> _Sum | None:
    """`x[:, None] * y`, as `jnp.outer` computes it."""
    out = eqn.outvars[0].aval
    is_float = jax.numpy.issubdtype(out.dtype, np.floating)
    if not is_float or sorted(x.axes + y.axes) != list(range(out.ndim)):
        return None
    # x[:, None] * y[None, :] is dot_general[((), ()), ((), ())] x y, of which the axes of the first
    # operand come first.
    first, second = (x, y) if x.axes < y.axes else (y, x)
    if first.axes + second.axes != tuple(range(out.ndim)):
        return None
    none: tuple[Any, Any] = (), ()
    traced = jax.make_jaxpr(lambda a, b: lax.dot_general(a, b, (none, none)))
    (product,) = traced(first.array, second.array).jaxpr.eqns
    return _Sum([_Product(product.primitive, product.params, (first.array, second.array))])


_RULES: dict[str, Callable[..., _Sum | _Spread | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "transpose": _transpose,
    **dict.fromkeys("reshape squeeze rev neg copy".split(), _shaped),
    "convert_element_type": _converted,
    "broadcast_in_dim": _broadcast,
    "pad": _padded,
    **dict.fromkeys(("add", "add_any"), _added),
    "mul": _multiplied,
    "div": _divided,
}
