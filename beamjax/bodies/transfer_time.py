"""Measures the seconds spent on moving values: to devices and back, and through the store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from beamjax.bodies.counts import counts


class _Local(threading.local):
    depth = 0
    begun = 0.0


_local = _Local()


class transferring(contextlib.ContextDecorator):
    """A context whose time counts as moving values; nested ones count once."""

    # A class and not a generator, as it is entered for each shard and must be fast.

    def __enter__(self) -> None:
        if not _local.depth:
            _local.begun = time.perf_counter()
        _local.depth += 1

    def __exit__(self, *error: object) -> None:
        _local.depth -= 1
        if not _local.depth:
            counts().transfer += time.perf_counter() - _local.begun


def is_copied(device: jax.Device | None) -> bool:
    """Whether arrays of the host must be copied to a device; None is JAX's default device.

    A CPU reads them in place if they begin at a multiple of 64 bytes. JAX copies others.
    """
    return (jax.devices()[0] if device is None else device).platform != "cpu"


def to_device(arrays: Sequence[Any], device: jax.Device | None) -> Sequence[Any]:
    """Copies the arguments of a body to a device, and waits until they are there."""
    with transferring():
        copies: Sequence[Any] = jax.block_until_ready(jax.device_put(list(arrays), device))
    return copies


def from_device(outs: Sequence[jax.Array]) -> list[np.ndarray]:
    """The results of a body as NumPy arrays. The time of their computation does not count."""
    for out in outs:
        out.block_until_ready()
    with transferring():
        return [np.asarray(out) for out in outs]
