"""The workloads by letter. Importing this imports neither JAX nor Beam."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.suite.problem import Problem

Size = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """A workload.

    Attributes:
      title: what it is, in a line; {names} are those of the size.
      problem: module of this package and class in it.
      full: size of the measurement.
      small: size of a test, which takes seconds.
      limits: for ways that would take minutes, a smaller number for one name of the size; the time
        of the full size is then extrapolated, and said to be.
      fedjax: whether FedJAX's for-each-client can do it.
      ways: those that are measured, if not all.
    """

    title: str
    problem: str
    full: Size
    small: Size
    limits: Mapping[str, Size] = field(default_factory=dict)
    fedjax: bool = False
    ways: tuple[str, ...] = ()

    def text(self, size: Size) -> str:
        """The title with numbers."""
        return self.title.format(**{name: f"{value:,}" for name, value in size.items()})

    def type(self) -> type[Problem]:
        module, _, name = self.problem.partition(":")
        found: type[Problem] = getattr(
            importlib.import_module(f"benchmarks.suite.cases.{module}"), name
        )
        return found

    def open(self, folder: Path, size: Size) -> Problem:
        """The workload with its data, which must have been written."""
        return self.type()(folder, size)


REGRESSION = "Local SGD of a linear model at {n} clients of {rows} x {features}, {steps} steps each"
SMALL_REGRESSION = {"n": 40, "rows": 8, "features": 4, "steps": 3}
MANY = {"element": {"n": 20_000}, "batch": {"n": 200_000}}

CASES = {
    "A": Case(
        REGRESSION + ", then the mean of the models",
        "regression:Regression",
        full={"n": 10_000, "rows": 32, "features": 64, "steps": 10},
        small=SMALL_REGRESSION,
        fedjax=True,
    ),
    "B": Case(
        REGRESSION + ": more work for each byte",
        "regression:Regression",
        full={"n": 4_096, "rows": 64, "features": 256, "steps": 50},
        small=SMALL_REGRESSION,
        fedjax=True,
    ),
    "C": Case(
        "PCA of a table of {n} rows and {features} columns, two passes",
        "pca:Pca",
        full={"n": 15_625_000, "features": 32},
        small={"n": 1_000, "features": 4},
        limits=MANY,
    ),
    "D": Case(
        "Monte Carlo: an option on {n} paths of {days} days, without data",
        "monte_carlo:MonteCarlo",
        full={"n": 10_000_000, "days": 4},
        small={"n": 1_000, "days": 4},
        limits=MANY,
    ),
    "E": Case(
        "Wide model: {width} x {width} weights go to {n} clients, which return as many",
        "wide:Wide",
        full={"n": 24, "rows": 8, "width": 5_000},
        small={"n": 10, "rows": 2, "width": 16},
    ),
    "F": Case(
        "LeNet on {n} clients of 1 to {most} images of {side} x {side}",
        "cnn:Cnn",
        full={"n": 128, "most": 64, "side": 28},
        small={"n": 12, "most": 16, "side": 16},
        fedjax=True,
    ),
    "G": Case(
        "{rounds} rounds of small work at {n} clients of {features} numbers",
        "rounds:Rounds",
        full={"n": 512, "features": 16, "rounds": 100},
        small={"n": 40, "features": 4, "rounds": 3},
        limits={"element": {"rounds": 20}, "batch": {"rounds": 20}, "ray-2": {"rounds": 12}},
    ),
    "H": Case(
        "Hypergradient: the slope of the loss in two rates, through {rounds} rounds at {n} clients",
        "hypergradient:Hypergradient",
        full={"n": 4_000, "images": 32, "features": 64, "rounds": 4, "steps": 3},
        small={"n": 20, "images": 8, "features": 6, "rounds": 2, "steps": 2},
    ),
    "L": Case(
        REGRESSION + ": more than ten seconds",
        "regression:Regression",
        full={"n": 4_096, "rows": 64, "features": 256, "steps": 2_500},
        small=SMALL_REGRESSION,
        ways=(
            "loop",
            "local",
            "direct",
            "session",
            "local-plain",
            "direct-plain",
            "batch",
            "dask-2",
            "ray-2",
        ),
    ),
    "M": Case(
        "Gradient of a perceptron with {width} hidden units, shared by {n} examples of {features}",
        "gradient:Gradient",
        full={"n": 20_000, "features": 784, "width": 256},
        small={"n": 40, "features": 8, "width": 4},
        limits={"element": {"n": 400}},
    ),
    "N": Case(
        "Median of each of {keys} keys of {n} rows in Parquet files",
        "medians:Medians",
        full={"n": 10_000_000, "keys": 1_000},
        small={"n": 1_000, "keys": 5},
        limits={"ray-2": {"n": 1_000_000}},
        ways=("jit", "loop", "local", "direct", "session", "dask-2", "ray-2", "duckdb"),
    ),
    "O": Case(
        "{rounds} rounds of {steps} steps at {cohort} of {n} clients of {rows} x {features}",
        "cohorts:Cohorts",
        full={"n": 100_000, "cohort": 50, "rounds": 1_000, "rows": 8, "features": 16, "steps": 5},
        small={**SMALL_REGRESSION, "cohort": 6, "rounds": 3},
        fedjax=True,
        ways=("jit", "loop", "local", "direct", "session", "fedjax"),
    ),
    "P": Case(
        "Logistic regression of {n} rows of {features} columns in Parquet files, five Newton steps",
        "logistic:Logistic",
        full={"n": 100_000_000, "features": 8},
        small={"n": 1_000, "features": 3},
        ways=("loop", "local", "direct", "session", "dask-2", "dask-ml", "ray-2"),
    ),
}
