"""JAX's cache of executables on disk, in which a process finds what another one has compiled."""

from __future__ import annotations

import threading
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from beamjax import _compat

_lock = threading.Lock()


def use_compile_cache(folder: str) -> None:
    """Has JAX keep in a folder what this process compiles from now on, and look there before.

    Args:
      folder: absolute path, or a URL that JAX knows.
    """
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": folder,
        # What takes less than a second counts too, where there are many processes.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_enable_compilation_cache": True,
    }
    with _lock:
        if all(getattr(_compat.config, name) == value for name, value in settings.items()):
            return
        for name, value in settings.items():
            jax.config.update(name, value)
        # It looks at its settings once, when it first compiles.
        compilation_cache.reset_cache()
