"""Runners that are servers of their own, for tests: what each needs, and how it is started.

`pytest -n0 --clusters` starts each of them once, at the first test that needs it; with
`-m smoke` for one test of Prism and one of Flink.
"""

import functools
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest

MISSING: dict[str, list[str]] = {}
"""What has to be installed to run what was skipped, by the mark of the tests."""

NEEDS = {"prism": ["go"], "flink": ["java", "javac", "mvn"], "spark": ["java", "javac", "mvn"]}
SECONDS = 200.0


@dataclass(frozen=True)
class Runner:
    """A runner, options with which it is on the servers of this session, and its Flink cluster."""

    name: str
    options: dict
    supervisor: Any = None

    def flags(self, **more):
        """Options for `beamjax.run`."""
        return {"pipeline_timeout": SECONDS, **self.options, **more}


def available(mark):
    """Whether tests with this mark can run here; notes what they lack."""
    from beamjax.pipelines.clusters import prism_server
    from beamjax.pipelines.clusters import processes as tools

    if mark == "prism" and prism_server.installed().exists():
        return True
    lacks = tools.missing(*NEEDS[mark])
    if lacks:
        MISSING[mark] = lacks
    return not lacks


def start_prism(stack):
    from beamjax.pipelines.clusters import prism_server

    prism_server.locate()
    return Runner("PrismRunner", {})


def start_cluster(stack):
    from beamjax.pipelines.clusters import flink_cluster, flink_supervisor

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="beamjax-flink-"))
    settings = flink_cluster.Settings(taskmanagers=2, slots=2)
    supervisor = stack.enter_context(flink_supervisor.running(folder, settings))
    return Runner("FlinkRunner", {"flink_cluster": folder, "parallelism": 2}, supervisor)


def start_embedded(stack):
    return Runner("FlinkRunner", {"flink_master": "[local]", "parallelism": 2})


def start_spark(stack):
    return Runner("SparkRunner", {"spark_master_url": "local[2]"})


RUNNERS = {
    "prism": (start_prism, "prism"),
    "flink": (start_cluster, "flink"),
    "flink-embedded": (start_embedded, "flink"),
    "spark": (start_spark, "spark"),
}


def params(*names):
    """Parameters of tests on these runners, with their marks."""
    return [pytest.param(name, marks=getattr(pytest.mark, RUNNERS[name][1])) for name in names]


def smoke(*names):
    """The same, where the gate runs them too."""
    marks = [(name, [getattr(pytest.mark, RUNNERS[name][1]), pytest.mark.smoke]) for name in names]
    return [pytest.param(name, marks=of_name) for name, of_name in marks]


def starter(stack):
    """A function that gives a runner by its name, started at its first use."""

    @functools.cache
    def started(name):
        start, mark = RUNNERS[name]
        if not available(mark):
            pytest.skip(f"needs {' and '.join(MISSING[mark])}")
        return start(stack)

    return started


def summary(config):
    """What a reader of the results of a session must know of tests that did not run."""
    if not config.getoption("--clusters"):
        yield "Prism, Flink and Spark: not tested; `pytest -n0 --clusters` does"
    for mark, lacks in MISSING.items():
        yield f"{mark.capitalize()}: NOT TESTED, for want of {' and of '.join(lacks)}"


def sharing(config):
    """Whether this session has processes that would each start servers."""
    return "PYTEST_XDIST_WORKER" in os.environ or bool(config.getoption("numprocesses", None))
