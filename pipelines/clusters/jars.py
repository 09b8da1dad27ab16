"""The Java side of Beam's runners for Flink and Spark: jars from Maven Central, fetched once."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from beamjax._text import listed
from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import processes
from beamjax.storage import locks
from beamjax.storage.trust import cache_folder

_OPENED = ("lang", "util", "nio", "io", "util.concurrent", "net", "lang.reflect", "text", "time")
JAVA_OPTIONS = (
    *(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED),
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/sun.net.util=ALL-UNNAMED",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)
"""Options that Flink 1.16 and Spark 3.2 need on Java 17, and that add times to their logs."""

SOURCES = Path(__file__).parent / "java"
"""The folder with files for Maven, the Java compiler and Flink."""
COPY_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:2.8:copy-dependencies"
"""What Maven runs; without the version, another Maven would take another one."""
_LOG = logging.getLogger("beamjax")


def classpath(name: str) -> Path:
    """The folder with the jars of `java/<name>.xml`, which Maven fetches at the first call."""
    pom, hashes = SOURCES / f"{name}.xml", SOURCES / f"{name}.sha256"
    purpose = f"the jars of {name.capitalize()}"
    folder = cache_folder(f"{name}-{_digest(pom, hashes)}")
    jars = folder / "jars"
    with locks.locked(folder):
        if not jars.exists():
            maven = processes.require("mvn", purpose)
            processes.require("java", purpose)
            _LOG.warning("fetching %s to %s (about 200 MB, once)", purpose, folder)
            fetched = folder / "fetched"
            shutil.rmtree(fetched, ignore_errors=True)
            processes.run(
                [maven, "-B", "-q", "-C", "-f", str(pom), COPY_DEPENDENCIES,
                 f"-DoutputDirectory={fetched}"],
                purpose,
                advice="; it needs Maven Central, or a mirror in ~/.m2/settings.xml",
            )  # fmt: skip
            _check(fetched, hashes)
            os.replace(fetched, jars)  # atomic, so a folder `jars` is always complete
    return jars


def _check(fetched: Path, hashes: Path) -> None:
    """Refuses jars of other names or contents than those in a list of `sha256sum`."""
    lines = [line.split() for line in hashes.read_text(encoding="utf-8").splitlines()]
    expected = {name: digest for digest, name in lines}
    actual = {}
    for path in fetched.iterdir():
        with open(path, "rb") as file:
            actual[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    other = sorted(n for n in {*expected, *actual} if expected.get(n) != actual.get(n))
    if other:
        raise OptionsError(
            f"{fetched}: found {len(other)} jars that are missing, unknown or of other contents "
            f"than in {hashes}: {listed(other)}. Does Maven have a mirror that changes them?"
        )


def own_classes(jars: Path, *names: str) -> Path:
    """A folder of classes that replace Beam's of the same names, for the front of a classpath."""
    sources = [SOURCES / f"{name}.java" for name in names]
    folder = jars.parent / f"classes-{_digest(*sources)}"
    with locks.locked(jars.parent):
        if not folder.exists():
            purpose = f"the servers of Beam ({', '.join(names)})"
            compiled = jars.parent / "compiled"
            shutil.rmtree(compiled, ignore_errors=True)
            javac = processes.require("javac", purpose)
            command = [
                javac,
                "-nowarn",
                "-cp",
                f"{jars}/*",
                "-d",
                str(compiled),
                *map(str, sources),
            ]
            processes.run(command, purpose)
            os.replace(compiled, folder)
    return folder


def java(heap: int, classes: list[Path], *arguments: str) -> list[str]:
    """A command that runs a Java program, with a heap of so many MiB."""
    entries = [str(path / "*") if path.name == "jars" else str(path) for path in classes]
    program = processes.require("java", "runner")
    return [program, *JAVA_OPTIONS, f"-Xmx{heap}m", "-cp", os.pathsep.join(entries), *arguments]


def names_job_server(flags: Mapping[str, Any], runner: str) -> bool:
    """Whether Beam's options for a runner, "flink" or "spark", name a job server already."""
    names = ("job_endpoint", f"{runner}_job_server_jar", f"{runner}_submit_uber_jar")
    return any(flags.get(name) for name in names)


def job_server(driver: str, ports: Sequence[int], folder: Path, *arguments: str) -> list[str]:
    """The arguments of `java` that run one of Beam's job servers, with ports for jobs and files."""
    return [
        f"org.apache.beam.runners.{driver}",
        "--job-host=localhost",
        f"--job-port={ports[0]}",
        f"--artifact-port={ports[1]}",
        "--expansion-port=-1",  # no expansion service
        f"--artifacts-dir={folder / 'artifacts'}",
        *arguments,
    ]


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
