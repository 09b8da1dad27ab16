"""The Java side of Beam's runners for Flink and Spark: jars from Maven Central, once a machine."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from beamjax.pipelines.clusters import processes
from beamjax.storage.cache_folder import cache_folder

_OPENED = ("lang", "util", "nio", "io", "util.concurrent", "net", "lang.reflect", "text", "time")
JAVA_OPTIONS = (
    *(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED),
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/sun.net.util=ALL-UNNAMED",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)
"""Options of Java 17 that Flink 1.16 and Spark 3.2 need, and times in their logs."""

SOURCES = Path(__file__).parent / "java"
"""Files for Maven, Java's compiler and Flink."""
_LOG = logging.getLogger("beamjax")


def classpath(name: str) -> Path:
    """The folder with the jars of `java/<name>.xml`, fetched by Maven at the first time.

    Args:
      name: "flink" or "spark".

    Raises:
      OptionsError: there is no Maven or no JDK, or Maven cannot fetch them.
    """
    pom = SOURCES / f"{name}.xml"
    purpose = f"the jars of {name.capitalize()}"
    folder = cache_folder(f"{name}-{_digest(pom)}")
    jars = folder / "jars"
    with processes.locked(folder):
        if not jars.exists():
            maven = processes.require("mvn", purpose)
            processes.require("java", purpose)
            _LOG.warning("beamjax: fetching %s to %s (about 200 MB, once)", purpose, folder)
            fetched = folder / "fetched"
            shutil.rmtree(fetched, ignore_errors=True)
            processes.run(
                [maven, "-B", "-q", "-f", str(pom), "dependency:copy-dependencies",
                 f"-DoutputDirectory={fetched}"],
                purpose,
                advice="; it needs Maven Central, or a mirror in ~/.m2/settings.xml",
            )  # fmt: skip
            os.replace(fetched, jars)
    return jars


def own_classes(jars: Path, *names: str) -> Path:
    """A folder of classes that stand before Beam's of the same names, for the front of a classpath.

    Args:
      jars: from `classpath`.
      *names: of files in the folder `java`, which say what they are for.

    Raises:
      OptionsError: there is no JDK, or it cannot compile them.
    """
    sources = [SOURCES / f"{name}.java" for name in names]
    folder = jars.parent / f"classes-{_digest(*sources)}"
    with processes.locked(jars.parent):
        if not folder.exists():
            purpose = f"the servers of Beam ({', '.join(names)})"
            made = jars.parent / "compiled"
            shutil.rmtree(made, ignore_errors=True)
            javac = processes.require("javac", purpose)
            command = [javac, "-nowarn", "-cp", f"{jars}/*", "-d", str(made), *map(str, sources)]
            processes.run(command, purpose)
            os.replace(made, folder)
    return folder


def java(heap: int, classes: list[Path], *arguments: str) -> list[str]:
    """A command that runs a Java program.

    Args:
      heap: in MiB.
      classes: folders of jars or of classes, as `classpath` and `own_classes` give them.
      *arguments: options of Java, the main class, and its arguments.

    Raises:
      OptionsError: there is no Java.
    """
    entries = [str(path / "*") if path.name == "jars" else str(path) for path in classes]
    program = processes.require("java", "runner")
    return [program, *JAVA_OPTIONS, f"-Xmx{heap}m", "-cp", os.pathsep.join(entries), *arguments]


def job_server(driver: str, ports: Sequence[int], folder: Path, *arguments: str) -> list[str]:
    """The main class of one of Beam's job servers and its arguments, as `java` takes them.

    Args:
      driver: the class, below `org.apache.beam.runners`.
      ports: for jobs and for artifacts. It is never asked to expand transforms.
      folder: below which artifacts go.
      *arguments: those that the others lack.
    """
    return [
        f"org.apache.beam.runners.{driver}",
        "--job-host=localhost",
        f"--job-port={ports[0]}",
        f"--artifact-port={ports[1]}",
        "--expansion-port=-1",
        f"--artifacts-dir={folder / 'artifacts'}",
        *arguments,
    ]


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
