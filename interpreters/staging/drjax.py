"""Programs written for the `drjax` package, staged to the primitives of beamjax.

This module never imports DrJAX: a process that has not imported it has no functions that it
decorated. A version of DrJAX with other internals is left unchanged: its programs run, but the
operands of their maps are gathered.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from beamjax.ops import operators as api
from beamjax.ops.placements import activate
from beamjax.ops.sharding import AnyMesh

# DrJAX has no primitive for a map: it calls `jax.vmap`, after which members can't be distinguished.
# Its primitives for broadcasts and reductions are created anew for each decorator. So beamjax
# replaces its operators before they trace anything. A function that `drjax.program` decorates sets
# the operators of the module `drjax` by `_replace_api` when it is called, and resets them when it
# returns. Within the context manager `operators_of_beamjax`:
#
# - `_replace_api` sets, in this thread, operators that bind the primitives of beamjax.
# - The operators that a thread sets on the module are only visible in that thread: the class of the
#   module gets a property for each operator, which looks in a thread-local table.
# - A user context is part of the key of all JAX caches. Otherwise a `jax.jit` around a program
#   could return a jaxpr that was traced with DrJAX's own operators.

OPERATORS = ("broadcast", "map_fn", "reduce_mean", "reduce_sum", "reduce_weighted_mean")


class _Thread(threading.local):
    """The operators that this thread sees in the module `drjax`; None for the module's own."""

    operators: dict[str, Callable[..., Any]] | None = None


_thread = _Thread()
_staging = jax.make_user_context(False)
_lock = threading.Lock()
_entered = 0


@contextlib.contextmanager
def operators_of_beamjax() -> Iterator[None]:
    """Replaces the operators of `drjax` by those of beamjax, in this thread, in a `with` block."""
    internals = _internals()
    if internals is None:
        yield
        return
    before = _thread.operators
    with _patched(sys.modules["drjax"], internals), _staging(True):
        _thread.operators = {name: getattr(internals, name) for name in OPERATORS}
        try:
            yield
        finally:
            _thread.operators = before


def _internals() -> types.ModuleType | None:
    """The module of DrJAX that sets the operators, if it is imported and of a known version."""
    module = sys.modules.get("drjax._src.api")
    known = hasattr(module, "_replace_api") and "drjax" in sys.modules
    return module if known else None


# --- the module `drjax`


def _operator_property(name: str) -> property:
    """A property for operator `name` of a module: the thread's value if set, else the module's."""

    def get(module: types.ModuleType) -> Any:
        return (_thread.operators or vars(module))[name]

    def put(module: types.ModuleType, value: Any) -> None:
        (vars(module) if _thread.operators is None else _thread.operators)[name] = value

    return property(get, put)


class _ModuleWithOperatorsOfThreads(types.ModuleType):
    """The class of the module `drjax` while any thread stages a program."""


for _name in OPERATORS:
    setattr(_ModuleWithOperatorsOfThreads, _name, _operator_property(_name))


@contextlib.contextmanager
def _patched(module: types.ModuleType, internals: Any) -> Iterator[None]:
    """Patches DrJAX until the last thread that needs it leaves."""
    global _entered
    with _lock:
        if not _entered:
            module.__class__ = _ModuleWithOperatorsOfThreads
            _replace_api.original = internals._replace_api
            internals._replace_api = _replace_api
        _entered += 1
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                module.__class__ = types.ModuleType
                internals._replace_api = _replace_api.original


class _ReplaceApi:
    """Replaces DrJAX's function of that name, which a program calls when it starts."""

    original: Callable[..., Any]

    def __call__(self, module: Any, computations: Any, primitives: Any, *, placement: str) -> Any:
        if _thread.operators is None:
            return self.original(module, computations, primitives, placement=placement)
        # This thread stages a program, so it gets the operators of beamjax.
        n = computations._placements_to_n_elements[placement]
        for operator in _operators(placement, n):
            setattr(module, operator.__name__, operator)
        return module


_replace_api = _ReplaceApi()


# --- the operators


def _operators(placement: str, n: int) -> list[Callable[..., Any]]:
    """The operators of a program, with the signatures that DrJAX gives them."""
    active = ((placement, n),)

    def broadcast(x: Any, *, mesh: AnyMesh | None = None) -> Any:
        with activate(active):
            return api.broadcast(x, mesh=mesh)

    def map_fn(fn: Callable[..., Any], arg: Any, *, mesh: AnyMesh | None = None) -> Any:
        with activate(active):
            return api.map_fn(fn, arg, mesh=mesh)

    def reduce_mean(x: Any) -> Any:
        with activate(active):
            return api.reduce_mean(x)

    def reduce_sum(x: Any) -> Any:
        with activate(active):
            return api.reduce_sum(x)

    def reduce_weighted_mean(x: Any, w: Any) -> Any:
        with activate(active):
            return api.reduce_weighted_mean(x, w)

    return [broadcast, map_fn, reduce_mean, reduce_sum, reduce_weighted_mean]
