"""The requirements of a run on its worker processes, checked when they start.

A `Machine` travels with the steps. When it is unpickled, before the process computes anything, it
sets the variables that JAX reads at its start. `check` then starts JAX; its errors say what to
change. Nothing here forks.
"""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from beamjax import _compat
from beamjax._version import __version__
from beamjax.bodies.compile_cache import use_compile_cache
from beamjax.bodies.export import default_platform
from beamjax.bodies.xla_threads import cpu_devices, hold_lapack_threads
from beamjax.errors import WorkerError
from beamjax.options import REQUIRED, XLA_THREADS, Options

PROCESS = uuid.uuid4().hex
"""Identifies this process; an id alone does not, as systems reuse ids."""

_log = logging.getLogger("beamjax")


@dataclass(frozen=True)
class Versions:
    """The versions with which bodies are exported or loaded.

    Attributes:
      beamjax, jax, jaxlib: versions.
      convention: by which `jax.export` calls what is exported; a number.
    """

    beamjax: str
    jax: str
    jaxlib: str
    convention: int

    @classmethod
    def here(cls) -> Versions:
        """The versions in this process."""
        found = _compat.versions()
        convention = _compat.config.jax_export_calling_convention_version
        return cls(__version__, found["jax"], found["jaxlib"], convention)

    def __str__(self) -> str:
        return f"beamjax {self.beamjax}, jax {self.jax}, jaxlib {self.jaxlib}"


def check_versions(
    made: Versions, here: Versions, platform: str, custom_calls: Sequence[str] = ()
) -> str | None:
    """Whether bodies that were exported there can be run here.

    `jax.export` promises that an artefact can be run by a JAX that is up to six months newer, or
    three weeks older, than the one that exported it. Hence another minor version that is older is
    an error; anything else but equal versions is a warning, as the last bits may differ. Custom
    calls without that promise take equal versions of jax and jaxlib.

    Args:
      made: where the program was launched.
      here: on the worker.
      platform: of the worker, for the advice.
      custom_calls: targets in the bodies for which JAX promises nothing.

    Returns:
      A warning, or None.

    Raises:
      WorkerError: they can't, or nothing says that they can.
    """
    if made == here:
        return None
    found = f"this worker has {here}, but the program was exported with {made}"
    todo = f"Use an image for the workers that is made with `{install_command(made, platform)}`"
    if made.beamjax != here.beamjax:
        raise WorkerError(f"{found}: both must have the same version of beamjax. {todo}")
    low, high = _compat.CALLING_CONVENTIONS
    if not low <= made.convention <= high:
        raise WorkerError(
            f"{found}: this jax reads artefacts of calling convention {low} to {high}, found "
            f"{made.convention}. {todo}"
        )
    if custom_calls and (made.jax, made.jaxlib) != (here.jax, here.jaxlib):
        raise WorkerError(
            f"{found}: the program holds the custom calls {', '.join(custom_calls)}, which may "
            "change with any version of JAX, so that both must have the same jax and jaxlib. "
            f"{todo}"
        )
    older = [
        name
        for name in ("jax", "jaxlib")
        if _compat.minor(getattr(here, name)) < _compat.minor(getattr(made, name))
    ]
    if older:
        raise WorkerError(
            f"{found}: jax.export promises to be read by versions up to three weeks older, no "
            f"more, and the worker's {' and '.join(older)} is older. {todo}, or launch the program "
            f"from an environment with `{install_command(here, 'cpu')}`"
        )
    return (
        f"{found}: the last bits of the results may differ, and jax.export promises to be read by "
        f"versions up to six months newer, no more. {todo}"
    )


_EXTRAS = {"cuda": "[cuda12]", "gpu": "[cuda12]", "tpu": "[tpu]"}


def install_command(versions: Versions, platform: str) -> str:
    """What installs these versions, for workers of a platform."""
    jax_package = f"jax{_EXTRAS.get(platform, '')}=={versions.jax}"
    return f"pip install 'beamjax=={versions.beamjax}' '{jax_package}' jaxlib=={versions.jaxlib}"


@dataclass(frozen=True)
class Machine:
    """What a worker must be.

    Attributes:
      require_platform: what it must compute on, "gpu" for any of "cuda" and "rocm"; None for
        anything that there is an artefact for.
      device_memory_fraction: of the memory of each device, for JAX.
      preallocate: whether JAX takes that memory when it starts.
      local_devices: how many devices of the worker are used; None for all of an accelerator, and
        one of a CPU.
      memory: of the process in bytes, which what is kept in caches depends on; None for any.
      compile_cache: where JAX keeps what it compiles; None for where it does so by itself.
      cache: where partials of shards are kept for later runs; None for nowhere.
      versions: of where the program was launched; None if they do not matter.
      custom_calls: in the bodies of the run, that take these very versions of jax and jaxlib.
      xla_threads: that XLA divides one computation among, on a CPU.
      strict: whether values of machines that may give other bits must not be mixed.
      launcher: the process that this was made in.
    """

    require_platform: str | None = None
    device_memory_fraction: float | None = None
    preallocate: bool | None = None
    local_devices: int | None = None
    memory: int | None = None
    compile_cache: str | None = None
    cache: str | None = None
    versions: Versions | None = None
    custom_calls: tuple[str, ...] = ()
    xla_threads: int = XLA_THREADS
    strict: bool = False
    launcher: str = PROCESS

    @classmethod
    def of(cls, options: Options) -> Machine:
        """What the workers of a run must be, that is launched from this process."""
        return cls(
            require_platform=options.require_platform,
            device_memory_fraction=options.device_memory_fraction,
            preallocate=options.preallocate,
            local_devices=options.local_devices,
            memory=options.memory_bytes,
            compile_cache=options.compile_cache,
            cache=options.cache,
            versions=Versions.here(),
            xla_threads=options.xla_threads,
            strict=options.strict,
        )

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.is_here and not _compat.backends_started():
            self._make_settings()

    def _make_settings(self) -> None:
        for name, value in self._environment().items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if not _compat.config.jax_platforms and self.require_platform in _PLATFORMS:
            # A device that can't be used is an error then, with the reason.
            jax.config.update("jax_platforms", _PLATFORMS[self.require_platform])

    def _environment(self) -> dict[str, str | None]:
        """The variables to set, or to remove, before JAX starts."""
        found: dict[str, str | None] = {}
        if self.device_memory_fraction is not None:
            found["XLA_CLIENT_MEM_FRACTION"] = f"{self.device_memory_fraction:g}"
            found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = None  # its old name; XLA refuses both
        if self.preallocate is not None:
            found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if self.preallocate else "false"
        return found

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that launched the run."""
        return self.launcher == PROCESS

    def check(self) -> tuple[Any, ...]:
        """Starts JAX and checks what the worker is, once a process.

        Returns:
          The devices that it computes on.

        Raises:
          WorkerError: it is not what it must be; the message says what to do.
        """
        if self.compile_cache is not None:
            use_compile_cache(self.compile_cache)
        return _check(self)

    def versions_checked(self, platform: str) -> None:
        """Warns or raises `WorkerError` if the versions here don't fit."""
        if self.versions is None:
            return
        warning = check_versions(self.versions, Versions.here(), platform, self.custom_calls)
        if warning:
            _log.warning(warning)

    def _problems(self) -> Iterator[str]:
        platform = default_platform()
        expected = self.require_platform
        if expected is not None and platform not in REQUIRED[expected]:
            yield (
                f"require_platform={expected!r}: JAX computes on {platform!r} here "
                f"({_why(platform)}). Give the worker such a device, its driver and an image with "
                f"`{install_command(Versions.here(), expected)}`; `beamjax doctor` on the worker "
                "says what is missing"
            )
        differing = {
            name: value for name, value in self._environment().items() if _environ(name) != value
        }
        if differing and platform != "cpu":
            settings = ", ".join(
                f"{name}={value}" if value else f"no {name}" for name, value in differing.items()
            )
            yield (
                f"JAX had started in this process before beamjax could set {settings}. Set it in "
                "the environment of the process (the ENV of its image), and let no module that is "
                "imported there compute with JAX at its top level"
            )
        available = len(jax.local_devices())
        if self.local_devices is not None and self.local_devices > available:
            yield (
                f"local_devices={self.local_devices}: this worker has {available} of platform "
                f"{platform!r}. Give a smaller number, or None for all of them"
            )


_PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu", "rocm": "rocm,cpu", "tpu": "tpu,cpu"}


@functools.lru_cache(maxsize=64)
def _check(machine: Machine) -> tuple[Any, ...]:
    machine.versions_checked(machine.require_platform or "cpu")
    if _forked:
        raise WorkerError(
            "this worker was forked from a process in which JAX had started; JAX does not work "
            "then. Start workers anew: multiprocessing.get_context('spawn')"
        )
    try:
        devices = tuple(jax.local_devices())
    except RuntimeError as error:
        platform = machine.require_platform
        raise WorkerError(
            f"JAX can't start on this worker ({error})"
            + (f"; the run has require_platform={platform!r}" if platform else "")
            + ". `beamjax doctor` on the worker says what is missing"
        ) from error
    for problem in machine._problems():
        raise WorkerError(problem)
    count = machine.local_devices
    if default_platform() == "cpu":
        devices = cpu_devices(machine.xla_threads)
        if not machine.is_here:  # where it is, LAPACK's threads are the user's after the run
            hold_lapack_threads()
        count = count or 1
    return devices[:count]


def _why(platform: str) -> str:
    platforms = _compat.config.jax_platforms
    if platforms:
        return f"JAX_PLATFORMS is {platforms!r}"
    return "it found no other device" if platform == "cpu" else "that is its default"


def _environ(name: str) -> str | None:
    return os.environ.get(name) or None


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = _forked or _compat.backends_started()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
