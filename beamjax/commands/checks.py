"""What `doctor` looks at: Python, packages, devices, folders and runners, one by one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from beamjax._version import __version__
from beamjax.options import REQUIRED

OK, WARNING, FAILED, ABSENT = "ok", "warning", "failed", "absent"
"""`FAILED` is what a run needs; `ABSENT` is what only some runs need."""

PYTHONS = ((3, 11), (3, 13))
"""The first and the last version of Python that beamjax is tested with."""
FREE_BYTES = 2**30
DRIVER = 525
"""The first NVIDIA driver that CUDA 12 runs with."""
TIMEOUT = 300
"""Seconds for anything that is tried."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      name: what.
      status: `OK`, `WARNING`, `FAILED` or `ABSENT`.
      found: there.
      mend: what to do about it; "" if it is fine.
    """

    name: str
    status: str
    found: str
    mend: str = ""


# --- Python and packages


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """The version of Python."""
    shown = ".".join(map(str, version))
    low, high = (".".join(map(str, v)) for v in PYTHONS)
    if version < PYTHONS[0]:
        return Finding("Python", FAILED, shown, f"use Python {low} to {high}")
    if version[:2] > PYTHONS[1]:
        mend = f"beamjax is tested with Python {low} to {high}; use one of them if this fails"
        return Finding("Python", WARNING, shown, mend)
    return Finding("Python", OK, shown)


def check_packages() -> Iterator[Finding]:
    """What beamjax requires, as its package says."""
    yield Finding("beamjax", OK, __version__)
    try:
        required = importlib.metadata.requires("beamjax") or []
    except importlib.metadata.PackageNotFoundError:
        mend = "install it with pip, so that its requirements are checked"
        yield Finding("packages", WARNING, "beamjax is imported, but not installed", mend)
        return
    from packaging.requirements import Requirement

    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            yield Finding(requirement.name, FAILED, "not installed", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            mend = f"pip install '{requirement}'"
            yield Finding(
                requirement.name, FAILED, f"{version}, expected {requirement.specifier}", mend
            )
        else:
            yield Finding(requirement.name, OK, version)


def check_jaxlib() -> Iterator[Finding]:
    """Whether the packages that JAX is made of fit each other."""
    jax, library = _version("jax"), _version("jaxlib")
    if jax is None or library is None:
        yield Finding("jaxlib", FAILED, f"jax {jax}, jaxlib {library}", "pip install jax")
        return
    status = OK if library == jax else WARNING
    mend = "" if library == jax else f"pip install jax=={jax} jaxlib=={jax}"
    yield Finding("jaxlib", status, library, mend)
    for plugin in _plugins():
        version = _version(plugin)
        fits = version is not None and version.split(".")[:3] == library.split(".")[:3]
        extra = plugin.removeprefix("jax-").partition("-")[0]
        mend = "" if fits else f"pip install 'jax[{extra}]=={jax}'; JAX ignores other versions"
        yield Finding(plugin, OK if fits else FAILED, str(version), mend)


def _plugins() -> list[str]:
    names = {str(d.metadata["Name"]).lower() for d in importlib.metadata.distributions()}
    return sorted(
        n for n in names if n.startswith(("jax-cuda", "jax-rocm")) and n.endswith("-plugin")
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- devices


def check_environment() -> Iterator[Finding]:
    """What JAX reads from the environment."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if all(os.environ.get(name) for name in names):
        mend = f"unset {names[1]}, the old name of {names[0]}: XLA refuses both together"
        yield Finding("memory fraction", FAILED, "set by two variables", mend)
    found = {k: v for k, v in os.environ.items() if k == "JAX_PLATFORMS" or k in names}
    if found:
        yield Finding("environment", OK, ", ".join(f"{k}={v}" for k, v in sorted(found.items())))


def probe(name: str) -> tuple[dict[str, Any] | None, str]:
    """Runs a probe in a process of its own.

    Returns:
      What it found, or None; and why it failed.
    """
    # Not all the memory of a device, which another process may be using.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    command = [sys.executable, "-m", "beamjax.commands.probes", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {TIMEOUT} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    lines = done.stderr.strip().splitlines()
    return None, lines[-1] if lines else f"exit status {done.returncode}"


def check_devices(required: str | None) -> Iterator[Finding]:
    """What JAX computes on, and whether a body and a run get through."""
    found, error = probe("devices")
    gpu = nvidia_gpus()
    if found is None:
        yield Finding("JAX", FAILED, error, _mend_devices(required, gpu))
    else:
        shown = f"{found['platform']}: {_counted(found['devices'])}"
        limits = [f"{memory / 2**30:.0f} GiB" for memory in found["memory"] if memory]
        shown += f", {_counted(limits)} for JAX" if limits else ""
        fits = required is None or found["platform"] in REQUIRED[required]
        idle = gpu is not None and found["platform"] == "cpu" and required != "cpu"
        status = (WARNING if idle else OK) if fits else FAILED
        if not fits:
            shown += f", expected {required}"
        mend = "" if status == OK else _mend_devices(required, gpu)
        yield Finding("devices", status, shown, mend)
    yield from check_driver(required, gpu)
    for name, label, mend in PROBED:
        found, error = probe(name)
        if found is None:
            yield Finding(label, FAILED, error, mend)
        else:
            yield Finding(label, OK, f"{found['seconds']:.1f} s")


PROBED = (
    (
        "body",
        "export and compile",
        "`python -m beamjax.commands.probes body` shows the whole error; install jax and jaxlib "
        "again",
    ),
    (
        "job",
        "run on DirectRunner",
        "`python -m beamjax.commands.probes job` shows the whole error; install apache-beam anew",
    ),
)


def _counted(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)


def nvidia_gpus() -> list[dict[str, str]] | None:
    """What `nvidia-smi` says of each GPU; None if there is none, or no driver."""
    fields = ("name", "memory.total", "memory.used", "driver_version")
    found = output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    if found is None:
        return None
    rows = [line.split(", ") for line in found.splitlines() if line.count(", ") == len(fields) - 1]
    return [dict(zip(fields, row, strict=True)) for row in rows] or None


def check_driver(required: str | None, gpus: list[dict[str, str]] | None) -> Iterator[Finding]:
    """NVIDIA's driver."""
    if gpus is None:
        if required in ("gpu", "cuda"):
            mend = (
                "install NVIDIA's driver, and give the container the GPU (docker run --gpus all; "
                "on Dataflow install-nvidia-driver in worker_accelerator)"
            )
            yield Finding("NVIDIA driver", FAILED, "nvidia-smi finds no GPU", mend)
        return
    for gpu in gpus:
        shown = f"{gpu['name']}, {gpu['memory.used']} of {gpu['memory.total']} used, driver "
        major = gpu["driver_version"].partition(".")[0]
        old = major.isdigit() and int(major) < DRIVER
        mend = f"install a driver from {DRIVER} on, for CUDA 12" if old else ""
        status = FAILED if old and required in ("gpu", "cuda") else WARNING if old else OK
        yield Finding("NVIDIA driver", status, shown + gpu["driver_version"], mend)


def _mend_devices(required: str | None, gpu: Any) -> str:
    if os.environ.get("JAX_PLATFORMS"):
        return f"JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']!r}; unset it, or set what you need"
    if gpu or required in ("gpu", "cuda"):
        return f"pip install 'jax[cuda12]=={_version('jax')}'; `beamjax doctor` shows the driver"
    if required in ("tpu", "rocm"):
        return f"pip install 'jax[{required}]=={_version('jax')}' on a machine with such a device"
    return "`python -c 'import jax; jax.devices()'` shows the whole error; install jax anew"


# --- folders


def check_folder(folder: str, label: str) -> Finding:
    """Whether a folder can be written, and has room."""
    from beamjax.storage import files

    base = f"beamjax-doctor-{uuid.uuid4().hex}.tmp"
    remedy = "give another folder (TMPDIR, or the option work_folder)"
    try:
        name = files.join(folder, base)
        files.write(name, b"doctor", make=False)
        same = bytes(files.read(name)) == b"doctor"
        files.remove_files(folder, [base])
    except Exception as error:  # of many kinds: each file system has its own
        return Finding(label, FAILED, f"{folder}: {type(error).__name__}: {error}", remedy)
    if not same:
        return Finding(label, FAILED, f"{folder}: does not read what was written", remedy)
    if files.is_url(folder):
        return Finding(label, OK, f"{folder}, written and read")
    free = shutil.disk_usage(folder).free
    status = OK if free >= FREE_BYTES else WARNING
    mend = "" if status == OK else f"make room, or {remedy}"
    return Finding(label, status, f"{folder}, {free / 2**30:.1f} GiB free", mend)


# --- runners


def check_runners(required: Sequence[str]) -> Iterator[Finding]:
    """Which of Beam's runners this machine can start or submit to; the others need a host."""
    for name, check in RUNNERS.items():
        missing = check()
        if not missing:
            yield Finding(name, OK, "can be used from here")
        else:
            status = FAILED if name.lower() in (r.lower() for r in required) else ABSENT
            yield Finding(name, status, "can't be used from here", "; ".join(missing))


def _prism() -> list[str]:
    from beamjax.pipelines.clusters import programs
    from beamjax.storage.cache_folder import cache_folder

    built = any(cache_folder("").glob("prism-*-loopback/prism"))
    if built or programs.find("go"):
        return []
    return ["install Go, from which Prism is built, or give prism_location=PATH"]


def _java() -> list[str]:
    from beamjax.pipelines.clusters import programs

    return [] if programs.find("java") else ["install Java 11 or 17 (a JDK)"]


def _flink() -> list[str]:
    return _java() + ([] if shutil.which("mvn") else ["install Apache Maven, which has the jars"])


def _dataflow() -> list[str]:
    there = all(importlib.util.find_spec(name) for name in ("apitools", "google.auth"))
    return [] if there else ["pip install 'beamjax[dataflow]'"]


RUNNERS: dict[str, Callable[[], list[str]]] = {
    "PrismRunner": _prism,
    "FlinkRunner": _flink,
    "SparkRunner": _flink,
    "DataflowRunner": _dataflow,
}
"""What each of them lacks here."""


def output(command: Sequence[str]) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
