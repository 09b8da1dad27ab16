"""Bodies that run as Python because StableHLO can't hold them, mostly for calls to the host.

In the process that makes a plan, such a body is a function in memory. Other processes get the
user's function as cloudpickle instead. A worker plans it once more, which results in the same
steps, and finds the function of a step by its name.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import io
import json
import logging
import math
import platform
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import jax

from beamjax import _compat
from beamjax._text import MAX_CHARACTERS, cut
from beamjax.bodies.held_bytes import held_bytes
from beamjax.bodies.jax_settings import settings, with_settings
from beamjax.errors import StagingError, WorkerError
from beamjax.options import Options
from beamjax.plan.steps import Body, Plan, PythonBody, Vectorization
from beamjax.storage.shared_cache import SharedCache


def _cut_text(record: logging.LogRecord) -> bool:
    if record.exc_info and len(str(record.exc_info[1])) > MAX_CHARACTERS:
        record.exc_text = cut("".join(traceback.format_exception(*record.exc_info)))
    return True


# JAX logs the error of a call to the host before it raises it.
_compat.CALLBACK_LOG.addFilter(_cut_text)


# --- functions in memory


class PythonFunction:
    """The function of a body, compiled once for each number of members."""

    # `sized` takes a number of members (None for a server step) to the function, which takes and
    # returns flat sequences of plain arrays.
    def __init__(self, sized: Callable[[int | None], Callable[..., Sequence[Any]]]):
        self._sized = sized
        self._settings = settings() | {
            "numpy_dtype_promotion": "standard",
            "numpy_rank_promotion": "allow",
        }
        self._compiled: dict[int | None, Any] = {}

    def at(self, members: int | None) -> Callable[..., Any]:
        """The function for this many members; it waits for all its calls to the host."""
        compiled = self._compile(members)

        def call(*args: Any) -> Any:
            with with_settings(self._settings):
                outs = jax.block_until_ready(compiled(*args))
                jax.effects_barrier()
                return outs

        return call

    def check(self, members: int | None, arguments: Sequence[Any]) -> int:
        """Lowers the function, to find errors before it runs; returns its `held_bytes`."""
        with with_settings(self._settings):
            traced = self._compile(members).trace(*arguments)
            traced.lower()
            return math.ceil(held_bytes(traced.jaxpr).peak)

    def _compile(self, members: int | None) -> Any:
        if members not in self._compiled:
            self._compiled[members] = jax.jit(self._sized(members))
        return self._compiled[members]


_known: weakref.WeakValueDictionary[str, PythonFunction] = weakref.WeakValueDictionary()


def python_body(
    name: str, function: PythonFunction, reason: str, fingerprint: str, lines: Sequence[str]
) -> tuple[str, Body]:
    """A key and a body that runs as Python."""
    key = uuid.uuid4().hex  # Functions can't be compared, so each body has a key of its own.
    # Weakly: this process finds the function by the key as long as the body is alive.
    _known[key] = function
    python = PythonBody(reason, digest(fingerprint.encode()), function)
    return key, Body(name, {}, tuple(lines), python)


def python_function(key: str, body: Body) -> PythonFunction:
    """The function of a body, in any process that can rebuild it."""
    python = body.python
    assert python is not None
    function = python.function or _known.get(key)
    if function is not None:
        return function
    bodies = _restaged(body.name, python.program).bodies.values()
    restaged = next((b.python for b in bodies if b.name == body.name), None)
    if restaged is None or restaged.function is None or restaged.fingerprint != python.fingerprint:
        raise WorkerError(
            f"{body.name}: it runs as Python ({python.reason}), but this process stages the "
            "function to another program than the launching process. Let the function depend on "
            "its arguments and closure alone, do not change what it closes over after its first "
            "run, and have the same versions of your modules on the workers; or take out what runs "
            "as Python"
        )
    return restaged.function


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- functions for other processes


@dataclass(frozen=True)
class Recipe:
    """What another process needs to make the same plan."""

    # `interpreters.planning.make_plan`, as data, because `bodies` does not import `interpreters`.
    make_plan: Callable[..., Any]
    call: Any  # a `FlatCall`, with or without the arguments' values
    options: Options  # those on which planning depends
    # Another process must not choose these two, since the rules depend on platforms and files.
    shard_sizes: Mapping[str, int]
    vectorizations: Mapping[str, Vectorization]
    unroll: bool = False
    settings: Mapping[str, Any] = field(default_factory=settings)

    def pickled(self) -> bytes:
        """The recipe as bytes, with the versions that the reader must have."""
        # The structure is a tree of numbers: a treedef with the user's own nodes can't be pickled.
        skeleton = self.call.restore(range(len(self.call.arguments)))
        arguments = [_abstract(argument) for argument in self.call.arguments]
        call = replace(self.call, arguments=arguments, structure=skeleton, restore=None)
        options = Options(
            platforms=(), on_error=self.options.on_error, on_nonfinite=self.options.on_nonfinite
        )
        chosen = dict(self.shard_sizes), dict(self.vectorizations)
        try:
            recipe = _dumps(
                (self.make_plan, call, options, self.unroll, chosen, dict(self.settings))
            )
            nodes = _nodes()
        except Exception as error:  # Objects may raise errors of any type.
            fn = self.call.fn
            raise StagingError(
                f"{_where(fn)}: a step runs as Python on the workers, so the function must "
                f"travel by cloudpickle, but {_culprit(fn)} can't be pickled "
                f"({type(error).__name__}: {error}). Make it where it is used, or import it from a "
                'module; or run with runner="local", or on a DirectRunner in this process, where '
                "nothing is pickled; beamjax.explain says which step runs as Python, and why"
            ) from error
        # The nodes are separate, because they must be registered before the recipe is read.
        return b"\n".join([json.dumps(versions()).encode(), base64.b64encode(nodes), recipe])


def versions() -> dict[str, str]:
    """The versions that must be the same where a function is pickled and where it is read."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"jax": jax.__version__, "python": python}


class _Pickler(cloudpickle.Pickler):
    """Writes symbolic dimensions as text, because JAX's objects can't be unpickled."""

    def reducer_override(self, obj: Any) -> Any:
        if jax.export.is_symbolic_dim(obj):
            return _dimension, (str(obj),)
        return super().reducer_override(obj)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _dimension(text: str) -> Any:
    (dim,) = jax.export.symbolic_shape(text, scope=_scope())
    return dim


@functools.cache
def _scope() -> Any:
    """The scope of all dimensions that this process reads: those of two scopes are never equal."""
    return jax.export.SymbolicScope()


def _nodes() -> bytes:
    """The pytree nodes of the main module, pickled by value: no worker can import that module."""
    nodes = _compat.node_types("__main__").items()
    return cloudpickle.dumps([entry for entry in nodes if _pickles(entry)])


def _register_nodes(pickled: bytes) -> None:
    entries = cloudpickle.loads(pickled)
    with _registering:  # JAX refuses a class that is registered already.
        for node, (take_apart, make) in entries:
            if node not in _compat.node_types(node.__module__):
                jax.tree_util.register_pytree_node(node, take_apart, make)


_registering = threading.Lock()


def _abstract(argument: Any) -> Any:
    """An argument without its value, and without a layout that names devices of this process."""
    aval = argument.aval
    weak = getattr(aval, "weak_type", False)
    aval = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    return argument._replace(aval=aval, value=aval if argument.comes_by_shards else None)


_MAX_RESTAGED = 8
"""Largest number of plans of other processes that this process holds."""
_plans: SharedCache[Plan] = SharedCache(_MAX_RESTAGED, lambda _: 1)


def _restaged(name: str, program: bytes) -> Plan:
    """The plan of a pickled recipe, which this process makes once."""
    return _plans.get(digest(program), functools.partial(_restage, name, program))


def _restage(name: str, program: bytes) -> Plan:
    if not program:
        raise WorkerError(
            f"{name}: it runs as Python, but its function is neither in this process nor "
            "sent along: a plan of another process was given to a runner"
        )
    header, nodes, recipe = program.split(b"\n", 2)
    expected = json.loads(header)
    if expected != versions():
        raise WorkerError(
            f"{name}: it runs as Python, which takes the same versions as where the "
            f"program is launched: found {versions()}, expected {expected}"
        )
    try:
        _register_nodes(base64.b64decode(nodes))
        return _make_plan(*cloudpickle.loads(recipe))
    except Exception as error:  # Of any type, since this runs the user's code.
        raise WorkerError(
            f"{name}: it runs as Python, but the function can't be staged in this "
            f"process: {type(error).__name__}: {error}. Have the modules that it uses on "
            "the workers, and define what it registers with JAX in such a module"
        ) from error


def _make_plan(
    make_plan: Callable[..., Any],
    call: Any,
    options: Options,
    unroll: bool,
    chosen: tuple[Mapping[str, int], Mapping[str, Vectorization]],
    values: Mapping[str, Any],
) -> Plan:
    restore = functools.partial(jax.tree.unflatten, jax.tree.structure(call.structure))
    with with_settings(values):
        return make_plan(replace(call, restore=restore), options, unroll, *chosen).plan


# --- messages


def _where(fn: Any) -> str:
    code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code else repr(fn)


def _culprit(fn: Any) -> str:
    """The innermost variable of a function that can't be pickled."""
    plain = inspect.unwrap(getattr(fn, "func", fn))
    seen: set[int] = set()
    while inspect.isfunction(plain) and id(plain) not in seen:
        seen.add(id(plain))
        closure = inspect.getclosurevars(plain)
        variables = {**closure.globals, **closure.nonlocals}
        bad = next((name for name, x in variables.items() if not _pickles(x)), None)
        if bad is None:
            break
        value = variables[bad]
        inner = inspect.unwrap(getattr(value, "func", value))
        if not inspect.isfunction(inner):
            return f"{bad!r} ({type(value).__name__}), which {plain.__name__} uses,"
        plain = inner
    return f"something in {getattr(plain, '__name__', plain)}"


def _pickles(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True
