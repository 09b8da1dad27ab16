"""Bodies that call the user's Python function, for `beamjax.replay`.

While `keeping` is active, `map_fn` maps a body that has one equation, `python_call`. JAX compiles
and transforms it like the traced body. Evaluated operation by operation, it calls the user's
function with arrays, so that a debugger can step through it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import tree_util
from jax.experimental import checkify

from beamjax import _compat
from beamjax._compat import ad, batching
from beamjax.ops.leaves import as_array

_KEEPING: ContextVar[bool] = ContextVar("keeping", default=False)
_RETURNED: ContextVar[list[tuple[str, Any]] | None] = ContextVar("returned", default=None)


@dataclass(frozen=True, eq=False)
class PythonCall:
    """The Python function of a body."""

    # The user's function and its name.
    fn: Callable[..., Any]
    name: str
    # Its arguments with all members, of which only the structure is used.
    arguments: tuple[Any, ...]
    # The tracers and arrays that it closes over.
    closed_over: tuple[Any, ...] = ()

    def mapped(self, jaxpr: _compat.ClosedJaxpr, consts: Sequence[Any]) -> _compat.ClosedJaxpr:
        """The body to map: one that calls the function if `keeping` is active."""
        if not _KEEPING.get():
            return jaxpr
        call = replace(self, closed_over=tuple(consts))
        bind = functools.partial(call_p.bind, jaxpr=jaxpr, call=call)
        return jax.make_jaxpr(bind)(*jaxpr.in_avals)


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """A context in which staged bodies call the user's Python function."""
    token = _KEEPING.set(True)
    try:
        yield
    finally:
        _KEEPING.reset(token)


@contextlib.contextmanager
def collecting() -> Iterator[list[tuple[str, Any]]]:
    """Collects the names of the functions that `python_call` calls, and the trees they return."""
    returned: list[tuple[str, Any]] = []
    token = _RETURNED.set(returned)
    try:
        yield returned
    finally:
        _RETURNED.reset(token)


call_p = _compat.Primitive("python_call")
call_p.multiple_results = True


@call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, jaxpr: _compat.ClosedJaxpr, **_: Any) -> tuple[list[Any], Any]:
    return jaxpr.out_avals, jaxpr.effects


@call_p.def_impl
def _call(*args: Any, jaxpr: _compat.ClosedJaxpr, call: PythonCall) -> list[jax.Array]:
    # The function may close over tracers of the program, whose trace has ended by now. So a copy is
    # called, whose closure has the values of the member in their place.
    fn = _Substitution(dict(zip(map(id, call.closed_over), args, strict=False)))(call.fn)
    result = fn(*_compat.member_of(call.arguments, args[len(call.closed_over) :]))
    returned = _RETURNED.get()
    if returned is not None:
        returned.append((call.name, result))
    leaves = tree_util.tree_leaves_with_path(result)
    arrays = [as_array("map_fn", f"the result of {call.name}", *leaf) for leaf in leaves]
    types = zip(arrays, jaxpr.out_avals, strict=True)
    return [x.astype(aval.dtype) if x.dtype != aval.dtype else x for x, aval in types]


def _traced(*args: Any, jaxpr: _compat.ClosedJaxpr, **_: Any) -> list[jax.Array]:
    return _compat.jaxpr_as_fun(jaxpr)(*args)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    traced = functools.partial(_traced, **params)
    tangents = list(map(ad.instantiate_zeros, tangents))
    return call_p.bind(*primals, **params), jax.jvp(traced, list(primals), tangents)[1]


def _batched(args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    outs = jax.vmap(functools.partial(_traced, **params), in_axes=list(dims))(*args)
    return outs, [0] * len(outs)


def _checked(errors: Any, *args: Any, **params: Any) -> tuple[checkify.Error, list[Any]]:
    return checkify.checkify(functools.partial(_traced, **params), errors=errors)(*args)


_compat.register_lowering(call_p, _traced)
_compat.register_error_check(call_p, _checked)
ad.primitive_jvps[call_p] = _jvp
batching.primitive_batchers[call_p] = _batched


class _Substitution:
    """Copies objects that hold tracers, with values in place of the tracers."""

    # It looks into closures and defaults of functions, bound methods, `functools.partial`,
    # functions wrapped by `jax.jit` and similar decorators, trees, and the attributes of objects.
    # The values are by the `id` of the tracer.

    def __init__(self, values: dict[int, Any]):
        self._values = values
        self._copies: dict[int, Any] = {}

    def __call__(self, x: Any) -> Any:
        if id(x) in self._values:
            return self._values[id(x)]
        if id(x) in self._copies:
            return self._copies[id(x)]
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, functools.partial):
            parts = x.func, x.args, x.keywords
            func, args, keywords = map(self, parts)
            same = func is x.func and args is x.args and keywords is x.keywords
            return x if same else functools.partial(func, *args, **keywords)
        if isinstance(x, types.MethodType):
            owner = self(x.__self__)
            return x if owner is x.__self__ else types.MethodType(x.__func__, owner)
        if callable(x) and isinstance(getattr(x, "__wrapped__", None), types.FunctionType):
            inner = self(x.__wrapped__)
            return x if inner is x.__wrapped__ else inner
        return self._tree(x)

    def _function(self, fn: types.FunctionType) -> Any:
        cells = fn.__closure__ or ()
        if not (cells or fn.__defaults__ or fn.__kwdefaults__):
            return fn
        new = [types.CellType() for _ in cells]
        copied = types.FunctionType(
            fn.__code__, fn.__globals__, fn.__name__, self(fn.__defaults__), tuple(new)
        )
        copied.__kwdefaults__ = self(fn.__kwdefaults__)
        copied.__dict__.update(fn.__dict__)
        # Entered before the closure is copied, which may contain the function itself.
        self._copies[id(fn)] = copied
        changed = copied.__defaults__ is not fn.__defaults__
        changed |= copied.__kwdefaults__ is not fn.__kwdefaults__
        for cell, old in zip(new, cells, strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                cell.cell_contents = self(old.cell_contents)
                changed |= cell.cell_contents is not old.cell_contents
        if not changed:
            self._copies[id(fn)] = fn
            return fn
        return copied

    def _tree(self, x: Any) -> Any:
        leaves, tree = tree_util.tree_flatten(x, is_leaf=lambda node: id(node) in self._values)
        if len(leaves) == 1 and leaves[0] is x:
            return self._object(x)
        new = list(map(self, leaves))
        same = all(a is b for a, b in zip(new, leaves, strict=True))
        return x if same else tree_util.tree_unflatten(tree, new)

    def _object(self, x: Any) -> Any:
        """An object that is not a tree, copied if one of its attributes holds a tracer."""
        attributes = getattr(x, "__dict__", None)
        if type(attributes) is not dict or isinstance(x, jax.Array):
            return x
        self._copies[id(x)] = x  # It may hold itself.
        new = {name: self(value) for name, value in attributes.items()}
        if all(new[name] is value for name, value in attributes.items()):
            return x
        self._copies[id(x)] = changed = copy.copy(x)
        vars(changed).update({k: changed if v is x else v for k, v in new.items()})
        return changed
