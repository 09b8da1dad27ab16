"""Traces a user's function to a jaxpr, and flattens its arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.extend import core as jex

from beamjax import _compat
from beamjax.errors import StructureError
from beamjax.interpreters.dimensions import is_unknown, members_of_streams
from beamjax.interpreters.staging import drjax
from beamjax.interpreters.staging.batched_maps import maps_of_members_as_passes
from beamjax.interpreters.staging.tracers import refuse_tracers
from beamjax.interpreters.staging.unknown_sizes import explained
from beamjax.ops.keyed import Keyed
from beamjax.ops.leaves import name_of
from beamjax.ops.placements import observe
from beamjax.ops.tracer_errors import add_advice
from beamjax.sources.array_source import is_immutable
from beamjax.sources.source_base import LeafSpec, Source, StreamSource


@dataclass(frozen=True)
class Argument:
    """One flat argument."""

    path: str  # in the user's arguments, e.g. `args[0]['w']`
    aval: Any  # of the whole array
    value: Any  # the array or scalar, the `Source` it is a leaf of, or a `jax.ShapeDtypeStruct`
    leaf: int = 0  # its number, if the value is a `Source`

    @property
    def is_source(self) -> bool:
        return isinstance(self.value, Source)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.value, StreamSource)

    @property
    def file_rows(self) -> int:
        """Approximate number of members per file, a power of two; 0 if not in several files."""
        # Rounded, so that plans, and with them bits, rarely change when a file is added.
        files = len(self.value.cuts) + 1 if self.is_source and not self.is_stream else 1
        return 1 << (len(self.value) // files).bit_length() - 1 if files > 1 else 0

    @property
    def comes_by_shards(self) -> bool:
        """Whether only workers read it: from a source, or from a user's PCollection."""
        return isinstance(self.value, Source | jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class Staged:
    """A traced function: a closed jaxpr over flat arguments, and the tree of its results."""

    name: str
    closed: jex.ClosedJaxpr
    out_tree: Any
    placements: tuple[tuple[str, int], ...]  # names and sizes, of the programs that were called

    def __str__(self) -> str:
        return str(self.closed)

    @functools.cached_property
    def returns_keyed(self) -> bool:
        """Whether the tree of its results has a `Keyed`."""
        numbered = tree_util.tree_unflatten(self.out_tree, range(self.out_tree.num_leaves))
        nodes = tree_util.tree_leaves(numbered, is_leaf=lambda node: isinstance(node, Keyed))
        return any(isinstance(node, Keyed) for node in nodes)


@dataclass(frozen=True)
class FlatCall:
    """A call of a function of programs, with its arguments flattened."""

    fn: Callable[..., Any]
    arguments: Sequence[Argument]  # a `Source` stands for a tree of placed arrays
    structure: Any  # of the arguments; hashable, since it is part of the key of a plan
    restore: Callable[[Sequence[Any]], Any]  # the tree of arguments, from a value for each flat one

    @functools.cached_property
    def has_sources(self) -> bool:
        """Whether an argument is a source, rather than an array."""
        return any(argument.is_source for argument in self.arguments)

    @functools.cached_property
    def has_streams(self) -> bool:
        """Whether the number of members of a source is unknown."""
        return self.has_sources and any(argument.is_stream for argument in self.arguments)

    @property
    def avals(self) -> list[Any]:
        """Shapes and dtypes of the arguments."""
        return [argument.aval for argument in self.arguments]

    def with_arguments(self, arguments: Sequence[Argument]) -> FlatCall:
        """The call with other arguments of the same structure."""
        return replace(self, arguments=arguments)


def flatten_call(fn: Callable[..., Any], args: Sequence[Any]) -> FlatCall:
    """Flattens the arguments of a call; refuses what is neither data nor a source."""
    leaves, tree = tree_util.tree_flatten_with_path(
        tuple(args), is_leaf=lambda x: isinstance(x, Source)
    )
    flat: list[Argument] = []
    symbols: dict[str, Any] = {}
    counts: list[tuple[int, Any]] = []
    for path, leaf in leaves:
        name = f"args{tree_util.keystr(path)}"
        if isinstance(leaf, Source):
            flat += _source_arguments(name, leaf, symbols)
            counts.append((len(leaf.leaves), leaf.treedef))
        else:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                leaf = _checked(name, leaf, symbols)
            flat.append(Argument(name, _aval(name, leaf, args[path[0].idx]), leaf))
            counts.append((1, None))

    def restore(values: Sequence[Any]) -> Any:
        rest = iter(values)
        groups = []
        for count, subtree in counts:
            group = [next(rest) for _ in range(count)]
            groups.append(group[0] if subtree is None else tree_util.tree_unflatten(subtree, group))
        return tree_util.tree_unflatten(tree, groups)

    return FlatCall(fn, flat, (tree, tuple(counts)), restore)


def _source_arguments(name: str, source: Source, symbols: dict[str, Any]) -> list[Argument]:
    if isinstance(source, StreamSource):
        symbol = members_of_streams()
        n = symbols.setdefault(str(symbol), symbol)
    else:
        n = len(source)
    arguments = [
        Argument(f"{name}{spec.path}", None, source, i) for i, spec in enumerate(source.leaves)
    ]
    return [of_members(argument, source, n) for argument in arguments]


def of_members(argument: Argument, source: Source, n: Any) -> Argument:
    """The argument as a leaf of a source with n members."""
    spec = source.leaves[argument.leaf]
    shape, dtype = (n, *spec.shape), spec.dtype
    if spec.key_impl:
        key = functools.partial(jax.random.wrap_key_data, impl=spec.key_impl)
        aval = jax.eval_shape(key, jax.ShapeDtypeStruct(shape, dtype))
    else:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        aval = jax.ShapeDtypeStruct(shape, dtype)
    if not is_unknown(n) and n == 0:
        # There is nothing to read: the source is the array of its members.
        return replace(argument, aval=aval, value=_no_members(spec, dtype), leaf=0)
    return replace(argument, aval=aval, value=source)


def _no_members(spec: LeafSpec, dtype: Any) -> Any:
    """The array of all members of a leaf without members."""
    array = np.empty((0, *spec.shape), dtype)
    if spec.key_impl is None:
        return array
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=spec.key_impl)


def _aval(name: str, leaf: Any, argument: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        if isinstance(leaf, jax.Array):
            return jax.typeof(leaf)
        if type(leaf) is np.ndarray:
            return _compat.array_type(leaf.shape, leaf.dtype, _compat.config.jax_enable_x64)
        return jax.api_util.shaped_abstractify(leaf)
    except OverflowError as error:
        raise StructureError(
            f"{name}: found the int {leaf}, which JAX's default int does not hold; pass a NumPy "
            "scalar of a wider dtype, with 64-bit types enabled if it has 64 bits"
        ) from error
    except (TypeError, ValueError) as error:
        if isinstance(leaf, np.ndarray):
            raise StructureError(f"{name}: {_unusable(leaf)}") from error
        raise StructureError(
            f"{name}: found a {type(leaf).__name__} ({leaf!r:.80}), expected an array, a scalar or "
            f"a beamjax.Source; {_instead(leaf, argument)}"
        ) from error


def _unusable(array: np.ndarray) -> str:
    """Why JAX does not take an array of NumPy, and what to do."""
    if isinstance(array, np.ma.MaskedArray):
        return (
            "found a masked array, which JAX does not take; pass array.filled(...), and the mask "
            "as an argument if the program needs it"
        )
    if array.dtype.kind in "biufc" and not array.dtype.isnative:
        swapped = array.dtype.newbyteorder("=")
        return (
            f"found an array of the byte order of another machine, dtype {array.dtype.str!r}; "
            f"convert it with array.astype({swapped.name!r})"
        )
    found = f"found an array of dtype {array.dtype}, which JAX does not have"
    if array.dtype.kind in "US":
        bytes_ = "array" if array.dtype.kind == "S" else 'np.char.encode(array, "utf-8")'
        return f"{found}; pass its bytes as numbers: {bytes_}[..., None].view(np.uint8)"
    return f"{found}; convert it to numbers with array.astype(...)"


def _instead(leaf: Any, argument: Any) -> str:
    """Advice for a leaf of an argument that is not data."""
    if _comes_from("apache_beam", leaf):
        return (
            "beamjax.from_beam(transform, like=..., folder=...) makes one of what a PTransform "
            "reads, and beamjax.transform runs a program inside of a pipeline of your own"
        )
    from_equinox = functools.partial(_comes_from, "equinox")
    if any(map(from_equinox, tree_util.tree_leaves(argument, is_leaf=from_equinox))):
        return (
            "an equinox.Module holds functions beside its arrays: split it by "
            "params, static = eqx.partition(module, eqx.is_array), pass params, and call "
            "eqx.combine(params, static) in the program"
        )
    return "bind what is not data with functools.partial"


def _comes_from(package: str, x: Any) -> bool:
    """Whether a class of `x` is of a package, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(x).__mro__)


def _checked(
    name: str, aval: jax.ShapeDtypeStruct, symbols: dict[str, Any]
) -> jax.ShapeDtypeStruct:
    """Checks that at most the number of members of an abstract argument is symbolic."""
    unknown = [d for d in aval.shape if is_unknown(d)]
    if not unknown:
        return aval
    n = aval.shape[0]
    if not is_unknown(n) or len(unknown) > 1 or not str(n).isidentifier():
        raise StructureError(
            f"{name}: found a jax.ShapeDtypeStruct of shape {aval.shape}, expected at most the "
            "first dimension, the number of members, to be symbolic, and that a single symbol"
        )
    constraints = [c for c in _compat.constraints_of(n) if c.replace(" ", "") != f"{n}>=1"]
    if constraints:
        raise StructureError(
            f"{name}: found the symbolic dimension {n} with the constraints {constraints}, "
            "expected none: beamjax would not check them once the number of members is known"
        )
    # Dimensions of two scopes are never equal, so all symbols of a name become the first one.
    n = symbols.setdefault(str(n), n)
    return aval.update(shape=(n, *aval.shape[1:]))


def stage(call: FlatCall) -> Staged:
    """Traces the function of a call, which may be a program of beamjax or of DrJAX."""
    fn, restore, avals = call.fn, call.restore, call.avals
    out_tree = None

    # With `wraps`, messages of JAX name the user's function, its file and its parameters.
    @functools.wraps(fn, assigned=(), updated=())
    def flat(*args: Any) -> list[Any]:
        nonlocal out_tree
        results, out_tree = tree_util.tree_flatten(fn(*args))
        return results

    with _staging() as placements:
        try:
            closed = jax.make_jaxpr(flat)(*restore(avals))
        except Exception as error:
            explanation = explained(error, lambda *leaves: flat(*restore(leaves)), avals)
            if explanation is None:
                name = name_of(fn)
                add_advice(
                    error,
                    f"beamjax traces all arguments of {name}, as jax.jit does (bind a value that "
                    f"Python needs with functools.partial({name}, ...))",
                )
                raise
            raise explanation from error
    refuse_tracers("run", fn, {"a value that the function closes over": closed.consts})
    # As under jit, later changes of NumPy arrays that `fn` closes over have no effect.
    closed = _compat.with_constants(closed, _unchanging)
    return Staged(name_of(fn), closed, out_tree, tuple(placements))


@contextlib.contextmanager
def _staging() -> Iterator[dict[tuple[str, Any], None]]:
    """A context to trace a function in; collects the placements of the programs that it calls."""
    with observe() as placements, drjax.operators_of_beamjax(), maps_of_members_as_passes():
        yield placements


def _unchanging(array: np.ndarray) -> np.ndarray:
    """An array with these values that later changes of `array` do not reach."""
    return array if is_immutable(array) else _compat.copied_constant(array)


def declared_sizes(call: FlatCall) -> list[int]:
    """Sizes of the placements of all programs that a call runs, as far as it can be traced."""
    with _staging() as placements, contextlib.suppress(Exception):
        jax.make_jaxpr(lambda *leaves: tree_util.tree_leaves(call.fn(*call.restore(leaves))))(
            *call.avals
        )
    return [n for _, n in placements if isinstance(n, int)]
