"""JAX models for Beam's `RunInference`: `JaxModelHandler`, and files that hold such models.

A model is a function of parameters and a batch of examples. It travels as StableHLO, with its
parameters as raw arrays, so a worker needs neither the code that made it nor a pickle of it.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from jax import export, tree_util

from beamjax.bodies.load import with_x64
from beamjax.errors import ArrayFormatError, OptionsError, StructureError
from beamjax.interpreters.staging.flatten import host_call
from beamjax.options import parse_options
from beamjax.sources.source_base import Count, Positive
from beamjax.storage import files
from beamjax.storage.arrays import (
    decode_arrays,
    dtype_from_name,
    dtype_name,
    encode_arrays,
    plain_array,
)
from beamjax.storage.schema import from_plain
from beamjax.storage.treedefs import tree_from_json, tree_to_json

BATCH_SIZES = (1, 8, 64)
"""The default batch sizes that a model is compiled for."""
MAX_INLINE_BYTES = 8 << 20
"""Largest model, in bytes, inside of a pipeline. Runners limit the size of a pipeline; Dataflow's
limit is 20 MB."""
_FORMAT = "beamjax model 1"


class JaxModelHandler(ModelHandler[Any, PredictionResult, "Model"]):
    """Runs a JAX model on the elements of a PCollection with `RunInference`.

    The elements are examples: arrays, numbers, or trees of them, all of the type of `example`. For
    each there is a `PredictionResult`, whose `inference` is the result of `fn`, as NumPy arrays.

    A batch is padded to the next batch size, by repeating its last example, so XLA compiles the
    model once for each size. Parameters are loaded and put on the device once in each worker
    process; with `large_model=True`, once on each machine. Beam's `KeyedModelHandler`, model
    updates by a side input, `with_preprocess_fn` and `with_exception_handling` work as with other
    handlers.

    Args:
      fn: the model: `fn(params, batch)` takes a tree like `example` with examples along axis 0, and
        returns a tree of arrays with examples along axis 0. Each result must depend on its own
        example only: the first batch of each size is computed again with other examples beside
        these, and a result that changes is an error.
      params: a tree of arrays.
      example: a tree of arrays, scalars or `jax.ShapeDtypeStruct`: the type of one element.
      model_path: the path or URL of a file that `save_model` wrote, instead of the other three.
      batch_sizes: the batch sizes for which XLA compiles the model; by default those in the file,
        or 1, 8 and 64. Beam's batches have at most as many examples as the largest.
      platforms: the platforms of the workers: "cpu", "cuda", "rocm" or "tpu"; by default that of
        this process.
      options: those of Beam's `ModelHandler`, such as `min_batch_size`, `max_batch_duration_secs`,
        `large_model`, `model_copies` and `env_vars`, but for `max_batch_size`.

    Raises:
      OptionsError: neither or both of a model and a path are given, a batch size is no int >= 1, or
        a platform or an option is unknown.
      StructureError: the model does not fit the example, or is larger than 8 MiB; save a larger one
        with `save_model`.
      ArrayFormatError: the file at `model_path` holds no model.

    Example::

        handler = JaxModelHandler(model.apply, params, example=np.zeros(28 * 28, np.float32))
        predictions = images | RunInference(handler)
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], Any] | None = None,
        params: Any = None,
        example: Any = None,
        *,
        model_path: str | None = None,
        batch_sizes: Sequence[int] | None = None,
        platforms: Sequence[str] | None = None,
        **options: Any,
    ):
        _check_options(options)
        if (fn is None) == (model_path is None):
            raise OptionsError(
                "JaxModelHandler: expected either a function fn with params and example, or "
                f"model_path; found {'neither' if fn is None else 'both'}."
            )
        self._path = model_path
        self._data = b""
        if fn is not None:
            self._data = encode_model(fn, params, example, batch_sizes, platforms)
            if len(self._data) > MAX_INLINE_BYTES:
                raise StructureError(
                    f"JaxModelHandler: the model has {len(self._data)} bytes, expected at most "
                    f"{MAX_INLINE_BYTES} in a pipeline. Write it to a file that workers read: "
                    "save_model(path, fn, params, example), JaxModelHandler(model_path=path)."
                )
        elif batch_sizes is None:
            batch_sizes = decode_model(_read(self._path or ""), self._path or "").batch_sizes
        self._sizes = _checked_sizes(batch_sizes)
        super().__init__(max_batch_size=self._sizes[-1], **options)

    def load_model(self) -> Model:
        """Reads the model, and puts its parameters on the device."""
        data = _read(self._path) if self._path else self._data
        return Model(decode_model(data, self._path or "JaxModelHandler"), self._sizes)

    def run_inference(
        self,
        batch: Sequence[Any],
        model: Model,
        inference_args: dict[str, Any] | None = None,
    ) -> Iterable[PredictionResult]:
        """Computes the predictions for the examples of a batch, in order.

        Returns:
          A `PredictionResult` for each example.

        Raises:
          StructureError: an example does not have the type that the model takes.
        """
        # One call for the whole batch: a model that processes share is behind a proxy.
        results = model(list(batch))
        return [PredictionResult(*pair, self._path) for pair in zip(batch, results, strict=True)]

    def update_model_path(self, model_path: str | None = None) -> None:
        """Uses the model in another file from now on."""
        self._path = model_path or self._path

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raises OptionsError if there are inference arguments: the model's signature is fixed."""
        if inference_args:
            raise OptionsError(
                f"JaxModelHandler: found the inference_args {sorted(inference_args)}, expected "
                "none. Make them parameters of the model, or part of each example."
            )

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        """Bytes of the arrays of a batch."""
        return sum(np.asarray(leaf).nbytes for leaf in tree_util.tree_leaves(list(batch)))

    def get_metrics_namespace(self) -> str:
        """The namespace of the metrics that `RunInference` counts."""
        return "BeamML_JAX"


def _check_options(options: dict[str, Any]) -> None:
    """Refuses options that Beam's `ModelHandler` does not have, which it would ignore."""
    parameters = inspect.signature(ModelHandler.__init__).parameters.values()
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"max_batch_size"}
    unknown = sorted(options.keys() - known - {"env_vars"})
    if unknown:
        raise OptionsError(
            f"JaxModelHandler: found the option {unknown[0]!r}, expected one of batch_sizes, "
            f"platforms, env_vars, {', '.join(sorted(known))}."
        )


def save_model(
    path: str,
    fn: Callable[[Any, Any], Any],
    params: Any,
    example: Any,
    *,
    batch_sizes: Sequence[int] | None = None,
    platforms: Sequence[str] | None = None,
) -> None:
    """Writes a model to a file for `JaxModelHandler(model_path=path)`.

    The file is written atomically, so model updates by a side input may watch for it.

    Args:
      path: the local path or URL of the file.
      fn: as for `JaxModelHandler`.
      params: as for `JaxModelHandler`.
      example: as for `JaxModelHandler`.
      batch_sizes: as for `JaxModelHandler`; by default 1, 8 and 64.
      platforms: as for `JaxModelHandler`.

    Raises:
      OptionsError: a batch size is no int >= 1, or a platform is unknown.
      StructureError: the model does not fit the example.
      Exception: any error of the file system.
    """
    files.write(path, encode_model(fn, params, example, batch_sizes, platforms))


def _read(path: str) -> memoryview:
    # Users may name a model by a link, unlike files that beamjax names.
    return files.read(path if files.is_url(path) else os.path.realpath(path))


# --- the bytes of a model


@dataclass(frozen=True)
class SavedModel:
    """A decoded model."""

    # The exported model by batch size; 0 stands for any batch size
    artefacts: dict[int, export.Exported]
    params: list[np.ndarray]  # the leaves of the parameters
    # The tree of an example, and the shape and dtype of each leaf.
    example: tuple[Any, list[jax.ShapeDtypeStruct]]
    result: Any  # the tree of a result
    batch_sizes: tuple[int, ...]  # for which it is compiled
    x64: bool  # whether it computes with 64-bit types


def encode_model(
    fn: Callable[[Any, Any], Any],
    params: Any,
    example: Any,
    batch_sizes: Sequence[int] | None,
    platforms: Sequence[str] | None,
) -> bytes:
    """The bytes of a model; see `JaxModelHandler` for arguments and errors."""
    sizes = _checked_sizes(batch_sizes)
    if platforms is not None:
        platforms = parse_options({"platforms": platforms}).platforms
    values, params_tree = _param_arrays(params)
    paths, tree = tree_util.tree_flatten_with_path(example)
    types = [_type_of(path, leaf) for path, leaf in paths]
    if not types:
        raise StructureError("JaxModelHandler: example has no arrays, expected one at least.")
    flat = _Flat(fn, params_tree, tree)
    avals = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    try:
        artefacts = _artefacts(flat, avals, types, sizes, platforms)
    except StructureError:
        raise
    except Exception as error:
        _explain(flat, avals, types, example, error)
        raise
    meta = {
        "format": _FORMAT,
        "artefacts": list(artefacts),
        "batch_sizes": list(sizes),
        "x64": jax.config.jax_enable_x64,
        "example": _checked_tree(tree, "example"),
        "types": [[dtype_name(np.dtype(t.dtype)), list(t.shape)] for t in types],
        "result": _checked_tree(flat.result, "the result of fn"),
    }
    return encode_arrays(
        [*(np.frombuffer(data, np.uint8) for data in artefacts.values()), *values], meta
    )


class _Flat:
    """A model as a function of flat lists."""

    def __init__(self, fn: Callable[[Any, Any], Any], params: Any, example: Any):
        self.fn = fn
        self.trees = params, example
        self.result: Any = None  # the tree of its results, once it was traced

    def __call__(self, params: list[Any], batch: list[Any]) -> list[Any]:
        trees = map(tree_util.tree_unflatten, self.trees, (params, batch))
        leaves, self.result = tree_util.tree_flatten(self.fn(*trees))
        return leaves


def _artefacts(
    flat: _Flat,
    avals: Sequence[Any],
    types: Sequence[Any],
    sizes: Sequence[int],
    platforms: Sequence[str] | None,
) -> dict[int, bytes]:
    """The exported model: for any batch size, with the key 0, or else for each of `sizes`."""

    def exported(size: Any) -> bytes:
        artefact = export.export(jax.jit(flat), platforms=platforms)(avals, _batch_of(types, size))
        _check_results(artefact.out_avals, flat.result, size)
        return bytes(artefact.serialize())

    (any_size,) = export.symbolic_shape("n")
    try:
        return {0: exported(any_size)}
    except StructureError:
        raise
    except Exception:
        # The model may not support a symbolic batch size. If the model itself is wrong, its error
        # is raised by this second export.
        return {size: exported(size) for size in sizes}


def _param_arrays(params: Any) -> tuple[list[np.ndarray], Any]:
    """The leaves of the parameters, and their tree."""
    leaves, tree = tree_util.tree_flatten_with_path(params)
    arrays = []
    for path, leaf in leaves:
        name = f"JaxModelHandler: params{tree_util.keystr(path)}"
        try:
            arrays.append(plain_array(jnp.asarray(leaf), name))
        except (TypeError, ValueError) as error:
            raise StructureError(
                f"{name}: found a {type(leaf).__name__} ({leaf!r:.80}), expected an array or a "
                "number; bind what is not data to fn with functools.partial."
            ) from error
    return arrays, tree


_VMAP = "If fn is for one example, give jax.vmap(fn, (None, 0))."


def _check_results(avals: Sequence[Any], tree: Any, size: Any) -> None:
    """Raises StructureError unless all results of a model have the examples along axis 0."""
    paths, _ = tree_util.tree_flatten_with_path(tree_util.tree_unflatten(tree, avals))
    for path, aval in paths:
        if not aval.shape or aval.shape[0] != size:
            shape = ", ".join(map(str, aval.shape))
            raise StructureError(
                f"JaxModelHandler: fn returns{_spaced(tree_util.keystr(path))} an array of shape "
                f"({shape}) for a batch of {size} examples, expected the examples along axis 0. "
                f"{_VMAP}"
            )


def _spaced(path: str) -> str:
    return f" as {path}" if path else ""


def _explain(
    flat: Callable[..., Any], avals: Any, types: Any, example: Any, error: Exception
) -> None:
    """Raises StructureError if it is known why a model can't be exported; for `error` itself."""
    failure = f"{type(error).__name__}: {error}"
    leaves = tree_util.tree_leaves(example)
    if isinstance(example, list | tuple) and all(isinstance(x, int | float) for x in leaves):
        kind = type(example).__name__
        raise StructureError(
            f"JaxModelHandler: example is a {kind} of numbers, so fn gets a {kind} of arrays, on "
            f"which it fails ({failure}). Give an array: example=np.asarray(...)."
        ) from error
    for call in filter(None, map(host_call, _equations(flat, avals, _batch_of(types, 1)))):
        raise StructureError(
            f"{call[1]}: the model calls Python while it runs ({call[0]}), which can't be exported "
            "to workers. Take the call out of the model."
        ) from error
    if _equations(flat, avals, types):
        raise StructureError(
            f"JaxModelHandler: fn fails on a batch, with examples along axis 0, but not on a "
            f"single example ({failure}). {_VMAP}"
        ) from error


def _batch_of(types: Sequence[Any], size: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size, *t.shape), t.dtype) for t in types]


def _equations(flat: Callable[..., Any], avals: Any, examples: Any) -> list[Any]:
    """The equations of a model on one example or a batch; none if it can't be traced."""
    try:
        return list(jax.make_jaxpr(flat)(avals, examples).jaxpr.eqns)
    except Exception:  # of any kind: it is the user's function
        return []


def decode_model(data: bytes | memoryview, path: str) -> SavedModel:
    """Undoes `encode_model`; raises ArrayFormatError for other bytes."""
    try:
        arrays, meta = decode_arrays(data)
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None
    if meta.get("format") != _FORMAT:
        raise ArrayFormatError(
            f"{path}: found the format {meta.get('format')!r}, expected {_FORMAT!r}: a file that "
            "save_model of this version of beamjax wrote."
        )
    fields = from_plain(_Meta, meta, path)
    params = arrays[len(fields.artefacts) :]
    try:
        types = [jax.ShapeDtypeStruct(shape, dtype_from_name(name)) for name, shape in fields.types]
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None
    example = tree_from_json(fields.example, path)
    if example.num_leaves != len(types) or len(fields.artefacts) > len(arrays):
        raise ArrayFormatError(
            f"{path}: found {len(arrays)} arrays and {len(types)} types, expected arrays for "
            f"{len(fields.artefacts)} artefacts, and {example.num_leaves} types"
        )
    artefacts = {
        size: _exported(data, path, len(params) + len(types))
        for size, data in zip(fields.artefacts, arrays, strict=False)
    }
    result = tree_from_json(fields.result, path)
    return SavedModel(artefacts, params, (example, types), result, fields.batch_sizes, fields.x64)


@dataclass(frozen=True)
class _Meta:
    """The fields of a model that are not arrays; see `SavedModel`."""

    artefacts: tuple[Count, ...]
    batch_sizes: tuple[Positive, ...]
    x64: bool
    example: Any
    types: tuple[tuple[str, tuple[Count, ...]], ...]
    result: Any


def _exported(data: np.ndarray, path: str, arguments: int) -> export.Exported:
    try:
        artefact = export.deserialize(bytearray(data))
        number = len(artefact.in_avals)
    except Exception as error:  # of any type: the bytes may be anything
        raise ArrayFormatError(
            f"{path}: found an artefact that JAX can't read ({error})"
        ) from error
    if number != arguments:
        raise ArrayFormatError(
            f"{path}: found an artefact of {number} arguments, expected {arguments}"
        )
    return artefact


def _checked_sizes(sizes: Sequence[int] | None) -> tuple[int, ...]:
    chosen = BATCH_SIZES if sizes is None else sizes
    is_list = isinstance(chosen, Sequence) and not isinstance(chosen, str)
    if not is_list or not chosen or any(type(size) is not int or size < 1 for size in chosen):
        raise OptionsError(f"batch_sizes: found {sizes!r}, expected ints >= 1.")
    return tuple(sorted(set(chosen)))


def _type_of(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    try:
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        dtype_name(np.dtype(aval.dtype))
    except (TypeError, StructureError) as error:
        raise StructureError(
            f"JaxModelHandler: example{tree_util.keystr(path)} is {leaf!r:.80}, expected an array, "
            f"a number or a jax.ShapeDtypeStruct ({error})."
        ) from None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _checked_tree(tree: Any, what: str) -> Any:
    record = tree_to_json(tree)
    try:
        same = tree_from_json(record, what) == tree
    except StructureError:
        same = False
    if not same:
        raise StructureError(
            f"JaxModelHandler: {what} is a tree {tree}, expected dicts, lists, tuples, named "
            "tuples and None as nodes."
        )
    return record


# --- a model in a worker


class Model:
    """A model with its parameters on the device of this process."""

    def __init__(self, saved: SavedModel, batch_sizes: Sequence[int]):
        self._tree, self._types = saved.example
        self._result = saved.result
        self._sizes = [n for n in batch_sizes if 0 in saved.artefacts or n in saved.artefacts]
        if not self._sizes:
            raise OptionsError(
                f"batch_sizes: found {list(batch_sizes)}, expected sizes of the saved model: "
                f"{sorted(saved.artefacts)}. It can't be computed on batches of another size."
            )
        self._x64 = saved.x64
        with with_x64(self._x64):
            self._params = jax.device_put(saved.params)
        self._calls = {size: jax.jit(artefact.call) for size, artefact in saved.artefacts.items()}
        self._checked: set[int] = set()

    def __call__(self, examples: list[Any]) -> list[Any]:
        """The result of each example, as trees of NumPy arrays."""
        results: list[Any] = []
        for first in range(0, len(examples), self._sizes[-1]):
            results += self._batch(examples[first : first + self._sizes[-1]])
        return results

    def _batch(self, examples: Sequence[Any]) -> list[Any]:
        size = next(size for size in self._sizes if size >= len(examples))
        rows = [self._leaves(example) for example in examples]
        rows += [rows[-1]] * (size - len(rows))
        batch = [np.stack(column) for column in zip(*rows, strict=True)]
        results = self._results(size, batch)
        if size > 1 and size not in self._checked:
            self._check_rows(size, batch, results)
            self._checked.add(size)
        return [
            tree_util.tree_unflatten(self._result, [leaf[i] for leaf in results])
            for i in range(len(examples))
        ]

    def _results(self, size: int, batch: list[np.ndarray]) -> list[np.ndarray]:
        call = self._calls.get(0) or self._calls[size]
        with with_x64(self._x64):
            results: list[np.ndarray] = jax.device_get(call(self._params, batch))
        return results

    def _check_rows(self, size: int, batch: list[np.ndarray], results: list[np.ndarray]) -> None:
        """Raises StructureError if the results of the first or last example depend on others."""
        for row, other in itertools.product((0, size - 1), (np.zeros_like, _changed)):
            changed = [other(x) for x in batch]
            for array, original in zip(changed, batch, strict=True):
                array[row] = original[row]
            changed_results = self._results(size, changed)
            wrong = [
                i for i, x in enumerate(results) if not _same_bits(x[row], changed_results[i][row])
            ]
            if wrong:
                # Some kernels of GPUs do not repeat their bits; then a difference shows nothing.
                again = self._results(size, batch)
                wrong = [i for i in wrong if _same_bits(results[i], again[i])]
            if wrong:
                names = tree_util.tree_unflatten(self._result, range(len(results)))
                paths = [tree_util.keystr(p) for p, _ in tree_util.tree_leaves_with_path(names)]
                raise StructureError(
                    f"RunInference: in a batch of {size} examples, the result"
                    f"{_spaced(paths[wrong[0]])} for an example changes with the other examples, "
                    "expected one that depends on its own example only: Beam chooses the batches, "
                    "and beamjax pads them. Normalize by fixed statistics, as BatchNorm does "
                    "outside of training, and reduce over other axes than axis 0."
                )

    def _leaves(self, example: Any) -> list[np.ndarray]:
        leaves, tree = tree_util.tree_flatten(example)
        if tree != self._tree:
            expected = tree_util.tree_unflatten(self._tree, self._types)
            raise StructureError(
                f"RunInference: found an example that is {_described(example)}, expected "
                f"{_described(expected)}, as in the example of the model. Convert the elements "
                "first, such as lists by np.asarray, or in with_preprocess_fn."
            )
        return [_as(leaf, aval) for leaf, aval in zip(leaves, self._types, strict=True)]


def _changed(array: np.ndarray) -> np.ndarray:
    """Other values for all rows: 2 x + 1, or `not x`."""
    return ~array if array.dtype == np.bool_ else (2 * array + 1).astype(array.dtype)


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes()


def _described(tree: Any) -> str:
    """A tree for messages: types and keys of its nodes, dtypes and shapes of its leaves."""
    if isinstance(tree, dict):
        return f"a dict with the keys {sorted(tree, key=str)!r:.200}"
    if isinstance(tree, list | tuple):
        inner = ", ".join(map(_described, tree[:4])) + (", ..." if len(tree) > 4 else "")
        return f"a {type(tree).__name__} of {len(tree)} ({inner})"
    if hasattr(tree, "dtype") and hasattr(tree, "shape"):
        return f"{tree.dtype}{list(tree.shape)}"
    return f"a {type(tree).__name__}"


def _as(leaf: Any, aval: jax.ShapeDtypeStruct) -> np.ndarray:
    array = np.asarray(leaf)
    if array.shape == aval.shape:
        if array.dtype == aval.dtype:
            return array
        if isinstance(leaf, bool | int | float | complex):
            converted = array.astype(aval.dtype)
            rounds = np.issubdtype(aval.dtype, np.inexact) and array.dtype.kind in "iuf"
            if rounds or converted == array:
                return converted
    raise StructureError(
        f"RunInference: found an example with {array.dtype}{list(array.shape)}, expected "
        f"{aval.dtype}{list(aval.shape)}, as in the example of the model. Convert the elements "
        "first, or in with_preprocess_fn."
    )
