"""Moves arrays to devices and back, and counts the seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from beamjax.spans import count


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
