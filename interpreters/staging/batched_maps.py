"""`lax.map(f, members, batch_size=k)` is staged as `lax.map(f, members)`: one pass.

The batch size says how to vectorize, which the plan decides for the members of a pass. JAX has no
primitive for such a map. It takes slices of the members, scans over groups of them, and calls the
function on the rest, after which members can't be distinguished. So `jax.lax.map` is replaced while
a program is staged, in the threads that stage one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from beamjax.ops.placements import has_members

# A user context is part of the key of all JAX caches. Otherwise a `jax.jit` in a program could
# return a jaxpr that was traced with batches.
_staging = jax.make_user_context(False)
_lock = threading.Lock()
_entered = 0
_map = jax.lax.map


def _map_of_members(f: Callable[..., Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """`jax.lax.map`, which ignores the batch size if a program is staged and `xs` are members."""
    whole = _staging.value and has_members(jax.tree.leaves(xs))
    return _map(f, xs, batch_size=None if whole else batch_size)


@contextlib.contextmanager
def maps_of_members_as_passes() -> Iterator[None]:
    """Makes `jax.lax.map` ignore batch sizes for members, in this thread, in a `with` block."""
    global _entered, _map
    with _lock:
        if not _entered:
            _map, jax.lax.map = jax.lax.map, _map_of_members
        _entered += 1
    try:
        with _staging(True):
            yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                jax.lax.map = _map
