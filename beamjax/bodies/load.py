"""Loads bodies of steps as compiled functions, in any process, and moves their arrays.

`export` makes their bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from beamjax import _compat
from beamjax._text import as_cause, described
from beamjax.bodies.xla_threads import use_lapack
from beamjax.errors import Failure, WorkerError
from beamjax.plan.steps import Body, Plan, Server
from beamjax.spans import count, loaded_from_disk
from beamjax.storage.shared_cache import SharedCache


def _narrowed(function: Callable[..., Any], dtypes: Sequence[str]) -> Callable[..., list[Any]]:
    """Undoes `_widened`, for results of these dtypes."""

    def narrowed(*args: Any) -> list[Any]:
        outs = function(*map(wider, args))
        return [x.astype(dtype) for x, dtype in zip(outs, dtypes, strict=True)]

    return narrowed


MAX_LOADED = 256
"""Largest number of loaded bodies, to bound the memory of a worker."""
_LOADED: SharedCache[Callable[..., Any]] = SharedCache(MAX_LOADED, lambda _: 1)


def load_body(
    key: str,
    body: Body,
    members: int | None = None,  # for a body that runs as Python; others have fixed shapes
    # A body that holds a mesh computes on the devices of the client of this device; None for those
    # of JAX. For any other body, the caller sets the device.
    device: Any = None,
) -> Callable[..., Any]:
    """The compiled function of a body, shared by all threads of this process."""
    platform = default_platform()
    if platform == "cpu":
        use_lapack(body)
    if body.python is not None:
        # Most bodies are exported.
        from beamjax.bodies.python_bodies import python_function

        return python_function(key, body).at(members)
    loaded = (key, platform, device.client if body.devices > 1 and device is not None else None)
    function = _LOADED.find(loaded)
    if function is None:
        return _LOADED.get(loaded, lambda: _loaded(body, platform, device))
    count("bodies_reused")
    return function


def _loaded(body: Body, platform: str, device: Any) -> Callable[..., Any]:
    began = time.perf_counter()
    count("bodies_loaded")
    if platform not in body.artefacts:
        raise WorkerError(
            f"{body.name}: this process computes on {platform!r}, but the body was "
            f"exported for {', '.join(body.artefacts)}; add platforms=[{platform!r}] to "
            "the options, or set JAX_PLATFORMS on the worker"
        )
    try:
        exported = export.deserialize(bytearray(body.artefacts[platform]))
    except Exception as error:  # Of many types, since FlatBuffers checks little.
        raise WorkerError(
            f"{body.name}: jax {jax.__version__} can't read the exported body: {error}; "
            "use the same version of jax on the workers as where the program is launched"
        ) from error
    if platform == "cpu" and not body.calls_lapack:
        exported = _without_lapack(exported)
    call = _narrowed(exported.call, body.narrow) if body.narrow else exported.call
    function = _on_mesh(call, body, device) if body.devices > 1 else jax.jit(call)
    count("compile", time.perf_counter() - began)
    return function


def _without_lapack(exported: export.Exported) -> export.Exported:
    """The same function, of which JAX does not know that it is for a CPU."""
    # Otherwise JAX imports SciPy for its LAPACK, which takes as long as to compile a small body.
    checks = *exported.disabled_safety_checks, export.DisabledSafetyCheck.platform()
    return dataclasses.replace(exported, platforms=("any",), disabled_safety_checks=checks)


_elsewhere: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any] | None]]
_elsewhere = weakref.WeakKeyDictionary()
_moving = threading.Lock()


def loaded_elsewhere(call: Any, args: Sequence[Any], device: Any) -> Callable[..., Any]:
    """The compiled function of a body on a CPU device of another client than its arguments'."""
    # The other client loads the machine code of the first one, in milliseconds. Machine code that
    # came from JAX's cache on disk can't be moved: XLA loads it, but fails to run it. JAX then
    # finds it on disk again. `call` is what `load_body` returned; on the first client, it can be
    # called with `args`.
    with _moving:
        by_device = _elsewhere.setdefault(call, {})
        if device not in by_device:
            compiled = call.lower(*args).compile()
            by_device[device] = None if loaded_from_disk.is_set() else _moved(compiled, device)
        return by_device[device] or call


def _moved(compiled: Any, device: Any) -> Callable[..., Any] | None:
    """A compiled function on another device; None if XLA can't serialize it."""
    from jax.experimental import serialize_executable  # for several threads

    try:
        code, ins, outs = serialize_executable.serialize(compiled)
        moved: Callable[..., Any] = serialize_executable.deserialize_and_load(
            code, ins, outs, backend=device.client, execution_devices=[device]
        )
    except (ValueError, jax.errors.JaxRuntimeError):
        return None
    return moved


# Only one thread computes on a mesh at a time. Otherwise, collectives of two computations could
# wait for each other forever.
_on_several = threading.Lock()


def _on_mesh(call: Callable[..., Any], body: Body, device: Any) -> Callable[..., Any]:
    """The compiled function of a body that holds a mesh; each device has all operands."""
    devices = jax.local_devices() if device is None else device.client.local_devices()
    if len(devices) < body.devices:
        raise WorkerError(
            f"{body.name}: the body computes on a mesh of {body.devices} devices, but this worker "
            f"has {len(devices)}. Give each worker more devices, or use a smaller mesh; on CPUs "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={body.devices} in their "
            "environment"
        )
    mesh = jax.sharding.Mesh(np.array(devices[: body.devices]), ("devices",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    compiled = jax.jit(call, in_shardings=replicated, out_shardings=replicated)

    def in_turn(*args: Any) -> Any:
        # The user may have set another mesh in this thread.
        with _on_several, jax.set_mesh(mesh):
            return jax.block_until_ready(compiled(*args))

    return in_turn


def run_server(
    plan: Plan, step: Server, known: Mapping[str, np.ndarray], device: Any = None
) -> dict[str, np.ndarray]:
    """Runs a `Server` step on `known` values, by name; a WorkerError names the step."""
    call = load_body(step.body, plan.bodies[step.body], device=device)
    try:
        with with_x64(plan.x64), on_device(device):
            outs = from_device(call(*(known[name] for name in step.inputs)))
    except Exception as error:
        failed = WorkerError(f"step {step.name!r}: {described(error)}")
        failed.failure = Failure(step.name)
        raise failed from as_cause(error)
    return dict(zip(step.outputs, outs, strict=True))


def default_platform() -> str:
    """The default platform of this process, by its name in `jax.export`."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    from jax.extend.backend import get_backend  # imports Pallas

    return "rocm" if "rocm" in get_backend().platform_version.lower() else "cuda"


def on_device(device: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX computes on a device; None for its default."""
    return contextlib.nullcontext() if device is None else jax.default_device(device)


def with_x64(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which 64-bit types are enabled or disabled, as when a program was staged."""
    if _compat.config.jax_enable_x64 == enabled:
        return contextlib.nullcontext()
    return jax.enable_x64(enabled)


def with_weak_type(x: Any, x64: bool) -> Any:
    """The array, weakly typed, which changes the types of what is computed from it."""
    if x.weak_type:
        return x
    with with_x64(x64):
        return _weakly_typed(x.shape, x.dtype)(x)


@functools.lru_cache(maxsize=256)
def _weakly_typed(shape: tuple[int, ...], dtype: Any) -> Callable[..., Any]:
    """A compiled identity that returns weakly typed arrays; JAX has no public function for it."""
    weak = jax.ShapeDtypeStruct(shape, dtype, weak_type=True)
    return jax.jit(lambda x: x).lower(weak).compile()


# --- arrays on devices, with the seconds of their transfer


def is_copied(device: jax.Device | None) -> bool:
    """Whether arrays of the host must be copied to a device; None is JAX's default device."""
    # A CPU reads them in place if they begin at a multiple of 64 bytes. JAX copies others.
    return (jax.devices()[0] if device is None else device).platform != "cpu"


def to_device(arrays: Sequence[Any], device: jax.Device | None) -> Sequence[Any]:
    """Copies the arguments of a body to a device, and waits until they are there."""
    began = time.perf_counter()
    copies: Sequence[Any] = jax.block_until_ready(jax.device_put(list(arrays), device))
    count("transfer", time.perf_counter() - began)
    return copies


def from_device(outs: Sequence[jax.Array]) -> list[np.ndarray]:
    """The results of a body as NumPy arrays. The time of their computation does not count."""
    for out in outs:
        out.block_until_ready()
    began = time.perf_counter()
    arrays = [np.asarray(out) for out in outs]
    count("transfer", time.perf_counter() - began)
    return arrays


# --- plain arrays, which bodies take and return


def unwrap(x: Any) -> Any:
    """The data of typed keys; any other array unchanged."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def raw_array(value: Any) -> np.ndarray:
    """An array or a scalar as a NumPy array, with the data of typed keys, and bools for float0."""
    array = np.asarray(unwrap(value) if isinstance(value, jax.Array) else value)
    return np.zeros(array.shape, np.bool_) if array.dtype == jax.dtypes.float0 else array


def wrap(x: Any, impl: str | None) -> Any:
    """Typed keys from their data if `impl` is not None; otherwise the array unchanged."""
    return jax.random.wrap_key_data(x, impl=impl) if impl else x


WIDER = {"int2": np.dtype("int8"), "uint2": np.dtype("uint8")}
"""Types that `jax.export` does not support, and the types that a body takes and returns instead."""


def wider(x: Any) -> Any:
    """An array, or the type of one, in a dtype that can be exported."""
    dtype = WIDER.get(x.dtype.name)
    if dtype is None:
        return x
    return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)
