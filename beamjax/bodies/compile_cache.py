"""Turns on JAX's cache of executables on disk, which processes share."""

from __future__ import annotations

import threading
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from beamjax import _compat

_lock = threading.Lock()


def use_compile_cache(folder: str) -> None:
    """Makes JAX use a folder as its cache of executables in this process, from now on.

    Args:
      folder: absolute path, or a URL that JAX supports.
    """
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": folder,
        # By default, JAX does not store executables that compile in less than a second. Here, many
        # processes may need them.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_enable_compilation_cache": True,
    }
    with _lock:
        if all(getattr(_compat.config, name) == value for name, value in settings.items()):
            return
        for name, value in settings.items():
            jax.config.update(name, value)
        # JAX reads these settings only once, at its first compilation.
        compilation_cache.reset_cache()
