"""JAX's cache of executables on disk, in which a process finds what another one has compiled."""

from __future__ import annotations

import threading
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from beamjax import _compat

_lock = threading.Lock()


def use_compile_cache(folder: str) -> None:
    """Lets JAX use a folder as its cache of executables in this process, from now on.

    Args:
      folder: absolute path, or a URL that JAX knows.
    """
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": folder,
        # Executables that compile in less than a second count too, as there may be many processes.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_enable_compilation_cache": True,
    }
    with _lock:
        if all(getattr(_compat.config, name) == value for name, value in settings.items()):
            return
        for name, value in settings.items():
            jax.config.update(name, value)
        # JAX reads the settings of its cache once, at its first compilation.
        compilation_cache.reset_cache()
