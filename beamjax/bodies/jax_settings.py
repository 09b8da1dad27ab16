"""The settings of JAX in this thread, and how a function runs with them in another one."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import jax

from beamjax import _compat

SETTINGS = (
    "enable_x64",
    "threefry_partitionable",
    "default_prng_impl",
    "default_matmul_precision",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "legacy_prng_key",
)
"""The settings of JAX on which the jaxpr of a function depends."""

DEBUGGING = ("debug_nans", "debug_infs")
"""The settings of JAX on which the checks of a compiled function depend."""

ALLOWED = {
    "disable_jit": False,
    "transfer_guard_host_to_device": "allow",
    "transfer_guard_device_to_device": "allow",
    "transfer_guard_device_to_host": "allow",
}
"""The settings of JAX under which a plan runs, whatever they are where the user calls `run`."""

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def settings(names: Iterable[str] = SETTINGS) -> dict[str, Any]:
    """The values of settings of JAX in this thread, by name."""
    return {name: getattr(_compat.config, f"jax_{name}") for name in names}


def debugging() -> dict[str, bool]:
    """The values of `DEBUGGING` in this thread, by name."""
    return settings(DEBUGGING)


def with_settings(values: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX has these settings."""
    here = settings(values)
    changed = {name: value for name, value in values.items() if here[name] != value}
    return _with_changed(changed) if changed else contextlib.nullcontext()


@contextlib.contextmanager
def _with_changed(values: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


def as_compiled() -> contextlib.AbstractContextManager[Any]:
    """A context in which exported bodies can run on arrays of NumPy."""
    here = settings(ALLOWED)
    # A transfer guard of None allows transfers, too.
    changed = {name: x for name, x in ALLOWED.items() if here[name] not in (None, x)}
    return _with_changed(changed) if changed else contextlib.nullcontext()


def with_settings_of_here(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Wraps a function for another thread, so that it runs with the settings of this thread."""
    here = settings((*SETTINGS, *DEBUGGING, *ALLOWED, "default_device"))

    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with with_settings(here):
            return function(*args, **kwargs)

    return call


def fulfil(future: Future[_Result], function: Callable[[], _Result]) -> None:
    """Gives a future the result of a function, or its error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        del future, function  # the traceback of the error leads to this frame


# --- threads

_idle: list[queue.SimpleQueue[Callable[[], None]]] = []
os.register_at_fork(after_in_child=_idle.clear)


def in_thread(
    function: Callable[[], _Result], outcome: Future[_Result] | None = None
) -> Future[_Result]:
    """Calls a function in a daemon thread, with the settings and context variables of this one."""
    outcome = Future() if outcome is None else outcome
    context, call = contextvars.copy_context(), with_settings_of_here(function)
    try:
        jobs = _idle.pop()  # saves 0.1 ms, the start of a thread
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="beamjax job", daemon=True).start()
    jobs.put(functools.partial(context.run, fulfil, outcome, call))
    return outcome


def _serve(jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        job = jobs.get()
        job()
        del job  # else its data would stay in memory until the next one
        _idle.append(jobs)
