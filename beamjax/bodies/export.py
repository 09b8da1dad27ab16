"""Exports bodies of steps to StableHLO bytes.

A body takes and returns only plain arrays. Typed PRNG keys are passed as their key data, and
wrapped inside.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from beamjax.bodies.held_bytes import held_bytes
from beamjax.bodies.jaxprs import equations
from beamjax.bodies.load import WIDER, wider
from beamjax.errors import StagingError
from beamjax.plan.steps import Body, ValueType


def value_type(aval: Any, placement: str | None = None, axis: int | None = None) -> ValueType:
    """The type of a value as raw data; the shape of a placed value is without its member axis."""
    shape, dtype, impl = tuple(aval.shape), aval.dtype, None
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        impl = key_impl(dtype)
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    if axis is not None:
        shape = (*shape[:axis], *shape[axis + 1 :])
    return ValueType(shape, np.dtype(dtype).name, impl, placement)


@functools.cache
def key_impl(dtype: Any) -> str:
    """The argument `impl` with which `jax.random.wrap_key_data` makes keys of this dtype."""
    impls = []
    jax.eval_shape(
        lambda key: impls.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype)
    )
    return impls[0]


class NotExportedError(StagingError):
    """JAX can trace a step, but not export it."""


def export_body(
    name: str,
    function: Callable[..., Sequence[Any]],
    arguments: Sequence[jax.ShapeDtypeStruct],
    platforms: Sequence[str],
    lines: Sequence[str] = (),
) -> tuple[str, Body]:
    """Exports a function of flat, plain arrays to StableHLO; returns its content hash and body."""
    # There is an artefact for each platform ("cpu", "cuda" or "tpu"), because an artefact for
    # several platforms gives other bits.
    artefacts = {}
    narrow: tuple[str, ...] = ()
    devices = 1
    targets: set[str] = set()
    compiled = jax.jit(function)
    failed = StagingError
    try:
        results = compiled.eval_shape(*arguments)
        if any(x.dtype.name in WIDER for x in (*arguments, *results)):
            narrow = tuple(x.dtype.name for x in results)
            compiled = jax.jit(_widened(function, arguments))
            arguments = list(map(wider, arguments))
        # What fails up to here can't be traced, and fails under `jax.jit` as well.
        working = math.ceil(held_bytes(compiled.trace(*arguments).jaxpr).peak)
        failed = NotExportedError
        for platform in platforms:
            exported, unstable = _exported(compiled, arguments, platform)
            artefacts[platform], devices = bytes(exported.serialize()), exported.nr_devices
            targets |= unstable
    except (ValueError, NotImplementedError) as error:
        raise failed(
            f"{name}: JAX can't export this step for {', '.join(platforms)}: {error}\n"
            f"It holds the lines {', '.join(lines) or '(none known)'}"
        ) from error
    digest = hashlib.blake2b(digest_size=16)
    for platform in sorted(artefacts):
        digest.update(platform.encode() + b"\0" + artefacts[platform])
    digest.update(",".join(narrow).encode())
    custom_calls = tuple(sorted(targets))
    body = Body(name, artefacts, tuple(lines), None, narrow, working, devices, custom_calls)
    return digest.hexdigest(), body


def _exported(
    compiled: Any, arguments: Sequence[jax.ShapeDtypeStruct], platform: str
) -> tuple[export.Exported, set[str]]:
    """The exported function, and the custom calls in it that other versions of JAX may lack."""
    # `jax.export` refuses custom calls unless each is named, so they are found in the message of
    # its error.
    make = functools.partial(export.export, compiled, platforms=[platform])
    try:
        return make()(*arguments), set()
    except ValueError as error:
        traced = compiled.trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
        calls = set(_CUSTOM_CALL.findall(lowered.as_text()))
        unstable = {target for target in calls if target in str(error)}
        # The error may have another reason. Targets of a user's own calls are the user's to allow.
        if not unstable or unstable & _user_targets(traced.jaxpr.jaxpr):
            raise
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in unstable]
    return make(disabled_checks=checks)(*arguments), unstable


_CUSTOM_CALL = re.compile(r'stablehlo\.custom_call @"?([\w.$]+)')


def _user_targets(jaxpr: Any) -> set[str]:
    """The targets of `jax.ffi.ffi_call`, which exist only where the user's module is imported."""
    calls = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "ffi_call")
    return {eqn.params["target_name"] for eqn in calls}


def _widened(
    function: Callable[..., Sequence[Any]], arguments: Sequence[jax.ShapeDtypeStruct]
) -> Callable[..., Sequence[Any]]:
    """The function with arguments and results in dtypes that can be exported."""

    def widened(*args: Any) -> list[Any]:
        narrow = [x.astype(spec.dtype) for x, spec in zip(args, arguments, strict=True)]
        return list(map(wider, function(*narrow)))

    return widened
