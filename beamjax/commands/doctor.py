"""`beamjax doctor`: what a machine or an image can run, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import click

from beamjax._version import __version__
from beamjax.commands.answers import DONE, FAILED, Answer, answers, echo
from beamjax.options.rules import PLATFORMS
from beamjax.pipelines.runners import runner_table

OK, WARNING, MISSING, ABSENT = "ok", "warning", "failed", "absent"
"""Statuses of a check: every run needs what is `MISSING`; only some runs need what is `ABSENT`."""
PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest version of Python that beamjax is tested with."""
FREE_BYTES = 2**30
"""Free space of a folder below which `doctor` warns, in bytes."""
REQUIRED = {"gpu": ("cuda", "rocm")} | {name: (name,) for name in PLATFORMS}
"""The values of `--require-platform`, and the platforms that each means."""
RUNNERS = tuple(spec.name for spec in runner_table.RUNNERS if not spec.in_this_process)
"""Runners that may need more than the packages of beamjax."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # what was checked
    status: str  # OK, WARNING, MISSING or ABSENT
    found: str
    remedy: str = ""  # what to do about it; "" if nothing is wrong

    def __str__(self) -> str:
        mark = {OK: "ok", WARNING: "warning", MISSING: "FAILED", ABSENT: "-"}[self.status]
        text = self.found.replace("\n", f"\n{'':9}")
        line = f"{mark:7}  {self.name}: {text}"
        return f"{line}\n{'':9}-> {self.remedy}" if self.remedy else line


@click.command()
@click.option(
    "--require-platform", type=click.Choice(list(REQUIRED)),
    help="Fail if JAX computes on another platform.",
)  # fmt: skip
@click.option(
    "--require-runner", multiple=True, type=click.Choice(RUNNERS, case_sensitive=False),
    help="Fail if this runner can't be used on this machine.",
)  # fmt: skip
@click.option("--work-folder", help="Check this folder or URL for the option work_folder.")
@answers
def doctor(
    require_platform: str | None, require_runner: Sequence[str], work_folder: str | None
) -> Answer:  # fmt: skip
    """Check what this machine can run, and what is missing."""
    # JAX would otherwise take the memory of a device that another process may be using.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    findings = []
    for finding in examine(require_platform, require_runner, work_folder):
        echo(finding)
        findings.append(finding)
    missing = [finding.name for finding in findings if finding.status == MISSING]
    text = f"{len(missing)} to fix: {', '.join(missing)}" if missing else "nothing is missing"
    data = {"findings": [asdict(finding) for finding in findings]}
    return Answer(data, f"\n{text}", FAILED if missing else DONE)


def examine(
    platform: str | None, runners: Sequence[str], work_folder: str | None
) -> Iterator[Finding]:
    """Checks this machine; yields each finding as soon as it is known."""
    yield check_python()
    yield from check_packages()
    yield check_platform(platform)
    yield from map(check_probe, PROBES)
    yield check_folder(tempfile.gettempdir(), "temporary folder")
    if work_folder is not None:
        yield check_folder(work_folder, "work folder")
    yield from (check_runner(name, name in runners) for name in RUNNERS)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """The version of Python."""
    shown = ".".join(map(str, version))
    if PYTHONS[0] <= version[:2] <= PYTHONS[1]:
        return Finding("Python", OK, shown)
    tested = " to ".join(".".join(map(str, v)) for v in PYTHONS)
    status = MISSING if version[:2] < PYTHONS[0] else WARNING
    return Finding("Python", status, shown, f"beamjax is tested with Python {tested}")


def check_packages() -> Iterator[Finding]:
    """Whether requirements of beamjax and JAX are installed; `pip check` checks all packages."""
    from packaging.requirements import Requirement

    installed = {str(d.metadata["Name"]).lower(): d for d in importlib.metadata.distributions()}
    plugins = [n for n in installed if n.startswith("jax-") and n.endswith("-plugin")]
    for name in ("beamjax", "jax", *plugins):
        if name not in installed:
            remedy = "install it with pip, so that its requirements can be checked"
            yield Finding(name, WARNING, "found no such package", remedy)
            continue
        for requirement in map(Requirement, installed[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                try:
                    version = importlib.metadata.version(requirement.name)
                except importlib.metadata.PackageNotFoundError:
                    version = None
                if version is None or not requirement.specifier.contains(version, prereleases=True):
                    text = f"{version or 'not installed'}, {name} needs {requirement}"
                    remedy = f"pip install '{requirement}'"
                    yield Finding(requirement.name, MISSING, text, remedy)
    yield Finding("beamjax", OK, __version__)


# --- devices


def check_platform(required: str | None) -> Finding:
    """The platform that JAX computes on, and JAX's report on this machine."""
    remedy = (
        "set or unset JAX_PLATFORMS; pip install 'jax[cuda12]', with a driver that `nvidia-smi` "
        "shows, in a container with `docker run --gpus all`"
    )
    try:
        import jax

        from beamjax.bodies.load import default_platform

        platform = default_platform()
        report = f"{platform}\n{jax.print_environment_info(return_string=True)}".rstrip()
    except Exception as error:  # each plugin raises errors of its own
        return Finding("JAX", MISSING, f"{type(error).__name__}: {error}", remedy)
    if required is not None and platform not in REQUIRED[required]:
        return Finding("JAX", MISSING, f"expected {required}, found {report}", remedy)
    return Finding("JAX", OK, report)


def probe_body() -> None:
    """Exports a body, reads it again and computes it."""
    import jax
    import numpy as np

    from beamjax.bodies.export import export_body
    from beamjax.bodies.load import default_platform, load_body

    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    key, exported = export_body("probe", lambda x: [x @ x], [x], [default_platform()])
    (product,) = load_body(key, exported)(np.ones((8, 8), np.float32))
    np.testing.assert_array_equal(product, np.full((8, 8), 8, np.float32))


def probe_run() -> None:
    """Runs a program on Beam's runner in this process."""
    import numpy as np

    import beamjax as bj

    mean = bj.program(members=20)(lambda x: bj.reduce_mean(bj.map_fn(lambda v: v * 2, x)))
    result = bj.run(mean, np.arange(20, dtype=np.float32), options={"shard_size": 8})
    np.testing.assert_array_equal(result, 19)


PROBES: dict[str, tuple[Callable[[], None], str]] = {
    "export and compile": (probe_body, "install jax and jaxlib again"),
    "run on DirectRunner": (probe_run, "install apache-beam again"),
}
"""Functions that try something, and the remedy if they fail."""


def check_probe(name: str) -> Finding:
    """Tries one of `PROBES`."""
    probe, remedy = PROBES[name]
    start = time.perf_counter()
    try:
        probe()
    except Exception as error:  # a broken installation raises anything
        return Finding(name, MISSING, f"{type(error).__name__}: {error}", remedy)
    return Finding(name, OK, f"{time.perf_counter() - start:.1f} s")


# --- folders and runners


def check_folder(folder: str, label: str) -> Finding:
    """Whether a folder can be written and has free space."""
    from beamjax.storage import files

    base = f"beamjax-doctor-{uuid.uuid4().hex}.tmp"
    remedy = "give another folder (TMPDIR, or the option work_folder)"
    try:
        name = files.join(folder, base)
        files.write(name, b"doctor", make=False)
        if bytes(files.read(name)) != b"doctor":
            raise OSError("the file that was written reads differently")
        files.remove_files(folder, [base])
    except Exception as error:  # each file system raises errors of its own
        return Finding(label, MISSING, f"{folder}: {type(error).__name__}: {error}", remedy)
    if files.is_url(folder):
        return Finding(label, OK, f"{folder}, can be written and read")
    free = shutil.disk_usage(folder).free
    shown = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < FREE_BYTES:
        return Finding(label, WARNING, shown, f"free some space, or {remedy}")
    return Finding(label, OK, shown)


def check_runner(name: str, required: bool) -> Finding:
    """Whether this machine can start a Beam runner, or submit jobs to it."""
    remedy = runner_table.spec_of(name).missing()
    if not remedy:
        return Finding(name, OK, "can be used")
    return Finding(name, MISSING if required else ABSENT, "can't be used", remedy)
