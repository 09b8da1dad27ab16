"""The only file that uses `jax.interpreters`, `jax._src` or differs by JAX version.

Tested on JAX 0.10.2 and 0.12.0.1. All other files of beamjax use public `jax` and the names below.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import jax
import jaxlib.version
import numpy as np
from jax import export
from jax._src import api, core, dispatch, source_info_util, tree_util, xla_bridge
from jax._src import checkify as jax_checkify
from jax._src import effects as jax_effects
from jax._src.array import ArrayImpl as ArrayImpl

# The names of `jax.extend.core`, of which a test checks that they are the same. To import them from
# there imports all of `jax.extend`, among it Pallas, which takes 17 ms of processor time.
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import gensym as gensym
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.core import jaxprs_in_params as jaxprs_in_params
from jax._src.core import subjaxprs as subjaxprs
from jax._src.interpreters import batching as jax_batching
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax._src.pjit import jit_p
from jax._src.random.threefry2x32 import threefry2x32_p as threefry2x32_p
from jax._src.state import discharge
from jax.experimental import checkify
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", Jaxpr)  # in JAX 0.12 every jaxpr is one

config: Any = jax.config
"""JAX's settings, whose names type checkers do not know."""


DIM_AS_VALUE = "dim_as_value"
"""The name of the primitive that returns a symbolic dimension as a number."""


CALLING_CONVENTIONS = (
    export.minimum_supported_calling_convention_version,
    export.maximum_supported_calling_convention_version,
)
"""The first and the last calling convention of exported functions that this JAX can call."""


def versions() -> dict[str, str]:
    """The versions of jax and jaxlib."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}


def minor(version: str) -> tuple[int, ...]:
    """The major and minor numbers of a version of JAX."""
    return tuple(int(part) for part in version.split(".")[:2])


def backends_started() -> bool:
    """Whether JAX has opened its devices, which is when it reads the environment."""
    # Read without JAX's lock, which may be held forever in a forked process.
    return bool(xla_bridge._backends)


def skip_exit_handlers() -> None:
    """Removes JAX's exit handlers, which wait for computations and clear caches that these use."""
    for handler in (api.clean_up, dispatch.wait_for_tokens):
        atexit.unregister(handler)


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether a function has been compiled, if `jax.jit` made it; True for any other function."""
    size = getattr(function, "_cache_size", None)
    return size is None or size() > 0


def is_tracing() -> bool:
    """Whether a transformation of JAX, or `jax.jit`, traces the caller."""
    return not core.trace_state_clean()


def device_array(array: np.ndarray, device: jax.Device | None = None) -> jax.Array:
    """As `jax.device_put`, in a tenth of its time. The result may share the memory of the array."""
    at = device or config.jax_default_device or jax.local_devices()[0]
    if not isinstance(at, jax.Device):  # the default may also be the name of a platform
        return jax.device_put(array)
    aval = array_type(array.shape, array.dtype, config.jax_enable_x64)
    sharding, committed = _sharding_on(at), device is not None
    placed: jax.Array = pxla.batched_device_put(aval, sharding, [array], [at], committed)
    return placed


@functools.lru_cache(maxsize=1024)
def array_type(shape: tuple[int, ...], dtype: np.dtype, x64: bool) -> Any:
    """The type in JAX of an array of NumPy, which depends on `x64`, the setting of this thread."""
    return jax.api_util.shaped_abstractify(np.broadcast_to(np.zeros((), dtype), shape))


@functools.lru_cache(maxsize=64)
def _sharding_on(device: jax.Device) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device)


def cpu_client(threads: int, devices: int) -> Any:
    """Makes another XLA client of `devices` CPU devices, which `jax.default_device` accepts."""
    # XLA reads this number when it makes a client. Compilation does not use it, but all cores.
    before = os.environ.get(_XLA_THREADS)
    os.environ[_XLA_THREADS] = str(threads)
    try:
        # An asynchronous client has its own threads, which would run the computations of all Python
        # threads sequentially.
        return xla_client.make_cpu_client(asynchronous=False, num_devices=devices)
    finally:
        if before is None:
            del os.environ[_XLA_THREADS]
        else:
            os.environ[_XLA_THREADS] = before


_XLA_THREADS = "PJRT_NPROC"


def folders_of(*names: str) -> list[str]:
    """The folders of packages, each with a trailing separator."""
    paths = [str(spec.origin) for name in names if (spec := find_spec(name)) is not None]
    return [os.path.join(os.path.dirname(os.path.abspath(path)), "") for path in paths]


OWN_FOLDERS = folders_of("beamjax", "beamjax.interpreters", "beamjax.pipelines")
"""The folders of beamjax. In a checkout, the last two are not inside the first one."""

# With this, JAX attributes equations to the lines of the user, and the bytes of an exported body do
# not depend on lines of beamjax.
for _folder in OWN_FOLDERS:
    source_info_util.register_exclusion(_folder)


def register_lowering(primitive: Primitive, fun: Callable[..., Any]) -> None:
    """Lowers `primitive` by tracing `fun`, which takes the operands and the parameters."""
    rule = mlir.lower_fun(fun, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, rule)


CALLBACK_LOG = logging.getLogger("jax._src.callback")
"""The log in which JAX writes errors of functions that compiled code calls on the host."""


@contextlib.contextmanager
def callback_errors() -> Iterator[list[BaseException]]:
    """Collects the exceptions of functions that compiled code calls on the host."""
    # XLA passes on only their text, but JAX logs them first.
    raised: list[BaseException] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                raised.append(record.exc_info[1])

    handler = Collect()
    CALLBACK_LOG.addHandler(handler)
    try:
        yield raised
    finally:
        CALLBACK_LOG.removeHandler(handler)


def register_dce(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers `rule(used_outputs, eqn) -> (used_inputs, new_eqn or None)`."""
    # JAX 0.10 passes (used, eqn), 0.12 passes (used, live_inputs, eqn).
    pe.dce_rules[primitive] = lambda used, *rest: rule(list(used), rest[-1])


def dce(closed: ClosedJaxpr, used: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Drops the outputs of a jaxpr that are not `used`; returns it, and which inputs are left."""
    jaxpr, used_inputs = pe.dce_jaxpr(closed.jaxpr, list(used), False)
    return ClosedJaxpr(jaxpr, []), list(used_inputs)


def member_of(batch: Any, leaves: Sequence[Any]) -> Any:
    """Builds one member of a tree of batches from its leaves, as `vmap` does."""
    # Types that JAX batches in their own way, such as `BCOO`, also hold a shape, which differs
    # between a batch and its members.
    handlers: Any = jax_batching.to_elt_handlers
    return _with_leaves(
        batch, leaves, lambda node, leaf: handlers[type(node)](lambda x, _: leaf(x), None, node, 0)
    )


def batch_of(member: Any, leaves: Sequence[Any], size: Any) -> Any:
    """Builds a tree of batches of `size` members like `member` from its leaves, as `vmap` does."""
    handlers = jax_batching.from_elt_handlers
    return _with_leaves(
        member,
        leaves,
        lambda node, leaf: handlers[type(node)](lambda n, x, _: leaf(x), size, node, 0),
    )


def _with_leaves(value: Any, leaves: Sequence[Any], make: Callable[..., Any]) -> Any:
    """A tree like `value` with other leaves; `make(node, new_leaf)` builds nodes of batch types."""
    rest = iter(leaves)

    def replaced(node: Any) -> Any:
        new = {id(old): next(rest) for old in jax.tree.leaves(node)}
        return make(node, lambda old: new[id(old)]) if is_batch(node) else new[id(node)]

    is_batch = jax_batching.is_vmappable
    nodes, tree = jax.tree.flatten(value, is_leaf=is_batch)
    return jax.tree.unflatten(tree, list(map(replaced, nodes)))


def register_error_check(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers `rule(errors, *operands, **params) -> (error, results)` for `checkify`."""
    # The rule returns the error of its own checks, which are those of the categories `errors`.

    def check(*args: Any, **params: Any) -> tuple[Any, Any]:
        # JAX 0.10 passes (error, errors, *operands), 0.12 passes a context before them.
        at = next(i for i, arg in enumerate(args) if isinstance(arg, checkify.Error))
        context, before, errors, operands = args[:at], args[at], args[at + 1], args[at + 2 :]
        failed, results = rule(errors, *operands, **params)
        leaves, tree = jax.tree.flatten(failed)
        if not leaves:
            return before, results
        fail = jax.make_jaxpr(lambda *x: checkify.check_error(jax.tree.unflatten(tree, x)))(*leaves)
        after, _ = jax_checkify.checkify_jaxpr(*context, fail, errors, before, *leaves)
        return after, results

    jax_checkify.error_checks[primitive] = check


def map_errors(function: Callable[..., Any], error: checkify.Error) -> checkify.Error:
    """Changes an error by `function(failed, code, payload)`, which returns the three changed."""
    # The function is called for each kind of check with whether one failed, which one, and the
    # arrays of its message.
    fields = ("_pred", "_code", "_payload")
    by_field = [getattr(error, field) for field in fields]
    new = {kind: function(*(values[kind] for values in by_field)) for kind in by_field[0]}
    changed = {f: {kind: x[i] for kind, x in new.items()} for i, f in enumerate(fields)}
    return dataclasses.replace(error, **changed)


def hoist_consts(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Turns the consts of a jaxpr into leading inputs, whose values it returns as well."""
    # (consts=[c]) { lambda c; x. jit[{ lambda d; y. … }] x }, with consts c and d, becomes
    # (consts=[]) { lambda ; c d x. jit[{ lambda ; d y. … }] d x }
    eqns, jit_vars, jit_consts = [], [], []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive is jit_p:
            inner, consts = hoist_consts(eqn.params["jaxpr"])
            if consts:
                eqn_vars = [_new_var(var.aval) for var in inner.jaxpr.invars[: len(consts)]]
                eqn = _with_leading_inputs(eqn, inner, eqn_vars)
                jit_vars += eqn_vars
                jit_consts += consts
        eqns.append(eqn)
    if not closed.consts and not jit_consts:
        return ClosedJaxpr(closed.jaxpr, []), []
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jit_vars, *jaxpr.invars],
        eqns=eqns,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(jaxpr, []), [*closed.consts, *jit_consts]


def with_constants(closed: ClosedJaxpr, change: Callable[[Any], Any]) -> ClosedJaxpr:
    """Replaces each NumPy array that is a const or a literal of a jaxpr by `change(array)`."""
    # This includes jaxprs inside equations. `change` returns the same array, or another one of
    # the same type. A jaxpr in which nothing changes remains the same object, since JAX caches by
    # the identity of a jaxpr.
    changed: dict[int, Any] = {}

    def value_of(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    def atom_of(atom: Any) -> Any:
        if not isinstance(atom, Literal) or value_of(atom.val) is atom.val:
            return atom
        return Literal(value_of(atom.val), atom.aval)

    def param_of(param: Any) -> Any:
        if isinstance(param, ClosedJaxpr):  # in JAX 0.12 every jaxpr is one
            jaxpr, consts = jaxpr_of(param.jaxpr), all_of(value_of, param.consts)
            same = jaxpr is param.jaxpr and consts is param.consts
            return param if same else ClosedJaxpr(jaxpr, consts)
        if isinstance(param, Jaxpr):
            return jaxpr_of(param)
        return all_of(param_of, param) if type(param) in (tuple, list) else param

    def jaxpr_of(jaxpr: Any) -> Any:
        eqns, outvars = all_of(eqn_of, jaxpr.eqns), all_of(atom_of, jaxpr.outvars)
        same = eqns is jaxpr.eqns and outvars is jaxpr.outvars
        return jaxpr if same else jaxpr.replace(eqns=eqns, outvars=outvars)

    def eqn_of(eqn: Any) -> Any:
        invars = all_of(atom_of, eqn.invars)
        params = {key: param_of(param) for key, param in eqn.params.items()}
        same = all(params[key] is param for key, param in eqn.params.items())
        return eqn if same and invars is eqn.invars else eqn.replace(invars=invars, params=params)

    def all_of(function: Callable[[Any], Any], values: Any) -> Any:
        mapped = type(values)(map(function, values))
        pairs = zip(mapped, values, strict=True)
        return values if all(new is old for new, old in pairs) else mapped

    return param_of(closed)


def copied_constant(array: np.ndarray) -> np.ndarray:
    """A copy of an array in a jaxpr, of the same type, which may be JAX's own array type."""
    aval = getattr(array, "aval", None)
    copy = np.array(array)
    copy.flags.writeable = False
    return copy if aval is None else type(array)(copy, aval)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of carried values among the operands of a scan."""
    # JAX 0.10 counts them, 0.12 holds the operands as a tree of (constants, carry, xs).
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def lower_high(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Replaces primitives of hijax, such as that of `jnp.searchsorted`, by their definitions."""
    # The result has no consts: their values are the second result, for the new leading inputs.
    public: Any = pe  # of JAX 0.12; bodies of 0.10 hold no such primitives
    return hoist_consts(public.lower_jaxpr2(closed))


def meaning_of_high(eqn: Any) -> ClosedJaxpr | None:
    """The definition of a hijax primitive in an equation; None for any other equation."""
    if eqn.primitive.name != "call_hi_primitive":
        return None
    meaning = functools.partial(eqn.primitive.to_lojax, **eqn.params)
    return jax.make_jaxpr(meaning)(*(var.aval for var in eqn.invars))


def without_references(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replaces mutable references that are created in a jaxpr by values."""
    return discharge.discharge_state(closed, lower=False)


def register_to_lojax(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers the rule that binds `primitive` again with jaxprs without hijax primitives."""
    primitive.to_lojax = rule


_new_var = gensym()


def _with_leading_inputs(eqn: Any, inner: ClosedJaxpr, new_vars: list[Any]) -> Any:
    """A call of `jit` for the jaxpr `inner`, with `new_vars` before its other inputs."""
    params = {**eqn.params, "jaxpr": inner}
    for key, default in _jit_input_params().items():
        params[key] = (*default * len(new_vars), *params[key])
    return eqn.replace(invars=[*new_vars, *eqn.invars], params=params)


@functools.cache
def _jit_input_params() -> dict[str, tuple[Any, ...]]:
    """The parameters of a call of `jit` that have an entry per input, for one plain input."""
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).eqns
    return {key: eqn.params[key] for key in ("donated_invars", "in_shardings", "in_layouts")}


def symbols_of(dim: Any) -> set[str]:
    """The names of the variables in a symbolic dimension; empty for an int."""
    return set() if isinstance(dim, int) else set(dim._get_vars())


def constraints_of(dim: Any) -> list[str]:
    """The constraints on the variables of a symbolic dimension, such as `n >= 8`."""
    return [constraint.debug_str for constraint in dim.scope._explicit_constraints]


def evaluate_dim(dim: Any, values: Mapping[str, Any]) -> Any:
    """The value of a symbolic dimension for these values of its variables: a number or an array."""
    return dim._evaluate(dict(values))


def hoist_dims(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[tuple[Any, Any]]]:
    """Turns symbolic dimensions that a jaxpr reads into leading inputs, which it returns too."""
    # { lambda ; x. let n = dim_as_value[dim=n]; … } becomes { lambda ; n x. let … }. Calls of `jit`
    # are hoisted too, but no other jaxprs inside equations: the operands of these are not ours.
    eqns, new_vars, dims = [], [], []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == DIM_AS_VALUE:
            (var,) = eqn.outvars
            new_vars.append(var)
            dims.append((eqn.params["dim"], var.aval))
            continue
        if eqn.primitive is jit_p:
            inner, inner_dims = hoist_dims(eqn.params["jaxpr"])
            if inner_dims:
                inner_vars = [_new_var(aval) for _, aval in inner_dims]
                eqn = _with_leading_inputs(eqn, inner, inner_vars)
                new_vars += inner_vars
                dims += inner_dims
        eqns.append(eqn)
    if not dims:
        return closed, []
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(
        invars=[*new_vars, *jaxpr.invars],
        eqns=eqns,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(jaxpr, closed.consts), dims


def outer_effects(effects: Iterable[Any]) -> set[Any]:
    """The effects that a caller of a jaxpr sees: all except those on references inside of it."""
    return {e for e in effects if type(e).__name__ != "InternalMutableArrayEffect"}


def node_types(module: str) -> dict[type, tuple[Callable[..., Any], Callable[..., Any]]]:
    """The pytree node classes of a module, with their flatten and unflatten functions."""
    known = getattr(tree_util, "_registry", {})
    return {t: (e.to_iter, e.from_iter) for t, e in known.items() if t.__module__ == module}


def is_ordered(effect: Any) -> bool:
    """Whether equations with this effect must run in the order of the program."""
    return bool(jax_effects.ordered_effects.contains(effect))


def without_side_effects(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drops equations that have an effect but no results, such as prints."""
    # Writes to references stay. Jaxprs inside equations are treated in the same way.
    jaxpr = closed.jaxpr
    if not jaxpr.effects:
        return closed
    eqns = [_strip_eqn(eqn) for eqn in jaxpr.eqns if not _is_side_effect(eqn)]
    effects = set().union(*(eqn.effects for eqn in eqns)) & set(jaxpr.effects)
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, effects=effects), closed.consts)


def _is_side_effect(eqn: Any) -> bool:
    arrays = all(isinstance(var.aval, jax.core.ShapedArray) for var in eqn.invars)
    return bool(eqn.effects) and not eqn.outvars and arrays


def _strip_eqn(eqn: Any) -> Any:
    if not eqn.effects:
        return eqn
    gone: set[Any] = set()

    def strip(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(strip, value)) if type(value) in (tuple, list) else value
        if not isinstance(value, ClosedJaxpr):
            return value
        stripped = without_side_effects(value)
        gone.update(set(value.effects) - set(stripped.effects))
        return stripped

    params = {key: strip(value) for key, value in eqn.params.items()}
    return eqn.replace(params=params, effects=set(eqn.effects) - gone)


@contextlib.contextmanager
def context_of(eqn: Any) -> Iterator[None]:
    """A context that traces with the settings and the user's source line of an equation."""
    with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
        yield


def bind(primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Binds a primitive with the parameters of an equation, as in evaluating a jaxpr."""
    bound = primitive.get_bind_params(params)
    # JAX 0.10 gives (functions, params), 0.12 params alone.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = primitive.bind(*functions, *args, **params)
    return list(results) if primitive.multiple_results else [results]
