"""Measures the seconds spent on moving values: to devices and back, and through the store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from beamjax.bodies.counts import counts


class _Depth(threading.local):
    depth = 0


_local = _Depth()


@contextlib.contextmanager
def transferring() -> Iterator[None]:
    """A context whose time counts as moving values; nested ones count once."""
    begun = time.perf_counter()
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1
        if not _local.depth:
            counts().transfer += time.perf_counter() - begun


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
    jax.block_until_ready(outs)
    with transferring():
        return [np.asarray(out) for out in outs]
