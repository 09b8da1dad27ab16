"""The requirements of a run on its worker processes, checked when they start."""

# A `Machine` is pickled with the steps, with the environment variables for JAX of the launching
# process. When it is unpickled, before the process computes anything, it sets those that the worker
# does not have. `check` then starts JAX; its errors say what to change. In a pool of workers, JAX
# has started already, so that only the variables on its compilation cache can be set.

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from beamjax import _compat
from beamjax._version import __version__
from beamjax.bodies.load import default_platform
from beamjax.bodies.xla_threads import cpu_devices, hold_lapack_threads
from beamjax.errors import WorkerError
from beamjax.storage.shared_cache import SharedCache

if TYPE_CHECKING:
    from beamjax.options import Options

PROCESS = uuid.uuid4().hex
"""Identifies this process. A pid does not, since systems reuse pids and machines share them."""

MEMORY = (
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)  # fmt: skip
"""Variables on the memory of devices that workers get from the launching process. XLA reads them
when JAX starts."""
_ONE_OF = MEMORY[:2]
"""Two names of one variable. XLA refuses both together."""
_CACHE: dict[str, Callable[[str], Any]] = {
    "JAX_COMPILATION_CACHE_DIR": str,
    "JAX_ENABLE_COMPILATION_CACHE": lambda text: text.lower() in ("1", "true", "yes", "on"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": int,
}
"""Variables on JAX's compilation cache that workers get as well. JAX reads them when it is
imported, so the setting of the same name is changed, too."""
_received: set[str] = set()
"""The variables that this process has from a launching process. A later one may replace them."""
_receiving = threading.Lock()

_log = logging.getLogger("beamjax")


def passed_on() -> dict[str, str]:
    """The environment variables of this process for its workers."""
    return {name: os.environ[name] for name in (*MEMORY, *_CACHE) if os.environ.get(name)}


@dataclass(frozen=True)
class Versions:
    """The versions with which bodies are exported or loaded."""

    beamjax: str
    jax: str
    jaxlib: str
    convention: int  # the calling convention version of `jax.export`

    @classmethod
    def here(cls) -> Versions:
        """The versions in this process."""
        versions = _compat.versions()
        convention = _compat.config.jax_export_calling_convention_version
        return cls(__version__, versions["jax"], versions["jaxlib"], convention)

    def __str__(self) -> str:
        return f"beamjax {self.beamjax}, jax {self.jax}, jaxlib {self.jaxlib}"


def check_versions(
    launched: Versions, here: Versions, platform: str, custom_calls: Sequence[str] = ()
) -> str | None:
    """Checks whether a worker can run bodies that were exported with these versions."""
    # `jax.export` guarantees that an artefact runs with a JAX that is up to six months newer, or
    # three weeks older, than the one that exported it. Hence an older minor version is an error.
    # Any other difference is a warning, which is returned, as the last bits may differ. Custom
    # calls without that guarantee need equal versions of jax and jaxlib.
    if launched == here:
        return None
    difference = f"this worker has {here}, but the program was exported with {launched}"
    todo = f"Use an image for the workers that is made with `{install_command(launched, platform)}`"
    if launched.beamjax != here.beamjax:
        raise WorkerError(f"{difference}: both must have the same version of beamjax. {todo}")
    low, high = _compat.CALLING_CONVENTIONS
    if not low <= launched.convention <= high:
        raise WorkerError(
            f"{difference}: this jax reads artefacts of calling convention {low} to {high}, found "
            f"{launched.convention}. {todo}"
        )
    if custom_calls and (launched.jax, launched.jaxlib) != (here.jax, here.jaxlib):
        raise WorkerError(
            f"{difference}: the program holds the custom calls {', '.join(custom_calls)}, which "
            "may change with any version of JAX, so that both must have the same jax and jaxlib. "
            f"{todo}"
        )
    older = [
        name
        for name in ("jax", "jaxlib")
        if _compat.minor(getattr(here, name)) < _compat.minor(getattr(launched, name))
    ]
    if older:
        raise WorkerError(
            f"{difference}: jax.export promises to be read by versions up to three weeks older, no "
            f"more, and the worker's {' and '.join(older)} is older. {todo}, or launch the program "
            f"from an environment with `{install_command(here, 'cpu')}`"
        )
    return (
        f"{difference}: the last bits of the results may differ, and jax.export promises to be "
        f"read by versions up to six months newer, no more. {todo}"
    )


_EXTRAS = {"cuda": "[cuda12]", "gpu": "[cuda12]", "tpu": "[tpu]"}


def install_command(versions: Versions, platform: str) -> str:
    """The command that installs these versions on workers of a platform."""
    jax_package = f"jax{_EXTRAS.get(platform, '')}=={versions.jax}"
    return f"pip install 'beamjax=={versions.beamjax}' '{jax_package}' jaxlib=={versions.jaxlib}"


@dataclass(frozen=True)
class Machine:
    """The requirements of a run on its workers."""

    # The platforms that a worker may compute on; None for any
    platforms: tuple[str, ...] | None = None
    # Variables for JAX, for workers that do not have them.
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    # The number of devices that a worker uses; None for all accelerators, or one CPU.
    local_devices: int | None = None
    memory: int | None = None  # of a worker in bytes, which limits its caches; None for unknown
    cache: str | None = None  # the folder of cached partials of shards
    versions: Versions | None = None  # where the program was launched; None for any
    # Custom calls in the bodies that need exactly these versions of jax and jaxlib
    custom_calls: tuple[str, ...] = ()
    xla_threads: int = 1  # among which XLA divides one computation on a CPU
    launcher: str = PROCESS  # `PROCESS` of the process that launched the run

    @classmethod
    def of(cls, options: Options) -> Machine:
        """The requirements of a run that this process launches."""
        return cls(
            platforms=options.platforms,
            environment=passed_on(),
            local_devices=options.local_devices,
            memory=options.memory_bytes,
            cache=options.cache,
            versions=Versions.here(),
            xla_threads=options.xla_threads,
        )

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # Unpickling is the first that a worker does with a step, so JAX has not started yet unless
        # another module started it.
        self.__dict__.update(state)
        self.set_up()

    def set_up(self) -> None:
        """Sets what this process lacks; called before it computes anything."""
        if not self.is_here:
            with _receiving:
                self._make_settings(_compat.backends_started())

    def _make_settings(self, has_started: bool) -> None:
        for name, value in self._missing().items():
            if has_started and name in MEMORY:
                continue  # `check` raises an error where it matters
            os.environ[name] = value
            _received.add(name)
            if name in _CACHE:
                jax.config.update(name.lower(), _CACHE[name](value))
                compilation_cache.reset_cache()  # JAX opens the folder only once
        if has_started:
            return
        if not _compat.config.jax_platforms and self.platforms and len(self.platforms) == 1:
            # With an explicit platform, JAX raises an error that says why it can't use it.
            jax.config.update("jax_platforms", _PLATFORMS[self.platforms[0]])

    def _missing(self) -> dict[str, str]:
        """The variables that this process does not have; those that it has take precedence."""
        own = {name for name in (*MEMORY, *_CACHE) if os.environ.get(name)} - _received
        own |= set(_ONE_OF) if own.intersection(_ONE_OF) else set()
        return {
            name: value
            for name, value in self.environment.items()
            if name not in own and os.environ.get(name) != value
        }

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that launched the run."""
        return self.launcher == PROCESS

    def check(self) -> tuple[Any, ...]:
        """Starts JAX, checks the requirements, once in each process, and returns the devices."""
        return _CHECKED.get(self, lambda: _check(self))

    def versions_checked(self, platform: str) -> None:
        """Warns or raises `WorkerError` if this process has unsuitable versions."""
        if self.versions is None:
            return
        warning = check_versions(self.versions, Versions.here(), platform, self.custom_calls)
        if warning:
            _log.warning(warning)

    def _problems(self) -> Iterator[str]:
        platform = default_platform()
        if self.platforms is not None and platform not in self.platforms:
            command = install_command(Versions.here(), self.platforms[0])
            yield (
                f"platforms={list(self.platforms)}: JAX computes on {platform!r} here "
                f"({_why(platform)}). Give the worker such a device, its driver and an image with "
                f"`{command}`; `beamjax doctor` on the worker says what is missing"
            )
        missing = {name: value for name, value in self._missing().items() if name in MEMORY}
        if missing and platform != "cpu":
            settings = ", ".join(f"{name}={value}" for name, value in missing.items())
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


_CHECKED: SharedCache[tuple[Any, ...]] = SharedCache(64, lambda _: 1)


def _check(machine: Machine) -> tuple[Any, ...]:
    expected = machine.platforms[0] if machine.platforms else "cpu"
    machine.versions_checked(expected)
    if _forked:
        raise WorkerError(
            "this worker was forked from a process in which JAX had started; JAX does not work "
            "then. Spawn the processes of workers: multiprocessing.get_context('spawn')"
        )
    try:
        devices = tuple(jax.local_devices())
    except RuntimeError as error:
        platforms = machine.platforms
        raise WorkerError(
            f"JAX can't start on this worker ({error})"
            + (f"; the run has platforms={list(platforms)}" if platforms else "")
            + ". `beamjax doctor` on the worker says what is missing"
        ) from error
    for problem in machine._problems():
        raise WorkerError(problem)
    count = machine.local_devices
    if default_platform() == "cpu":
        devices = cpu_devices(machine.xla_threads)
        if not machine.is_here:
            # For the life of the process. The launching process limits them during a run only.
            hold_lapack_threads()
        count = count or 1
    return devices[:count]


def _why(platform: str) -> str:
    platforms = _compat.config.jax_platforms
    if platforms:
        return f"JAX_PLATFORMS is {platforms!r}"
    return "it found no other device" if platform == "cpu" else "that is its default"


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = _forked or _compat.backends_started()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
