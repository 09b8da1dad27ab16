"""What beamjax costs: local SGD on every client, then the mean of the models, in six ways.

    python benchmarks/overhead.py --cases=A,B --rounds=3 --json=overhead.json

Each way has a process of its own, which stays alive for the whole case. They are asked for a round
in turn (1 2 3 4 5 6 1 2 3 ...), so only one computes at a time, and whatever else the machine does
in the meantime hurts all of them alike. This process imports neither JAX nor Beam.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

RATE = 0.1
LEGEND = """
Beam: pipelines written by hand on the same runner; seconds: of a call, median of the rounds;
x loop: over those of the shard loop; first: seconds of the first call, with staging and compiling;
peak: MiB of memory of the process at most, of which start was taken before the first call, by
imports and data; differs: largest difference from the model of jit"""
MAX_RATIO, MAX_SECONDS = 1.25, 1.5
"""The aim: DirectRunner takes at most this many times the shard loop, and so many seconds more."""

Call = Callable[[], Any]  # computes the mean model once
shared = SimpleNamespace(problem=None, function=None, mean=None, shard_size=None)
"""Where the hand-written pipelines find data and functions: Beam's workers are threads here."""

# --- the problem


@dataclass(frozen=True)
class Case:
    """Linear regression: `clients` times (rows, features), `steps` of SGD on each client."""

    clients: int
    rows: int
    features: int
    steps: int

    def __str__(self) -> str:
        data = f"{self.clients * self.rows * (self.features + 1) * 4 / (1 << 20):.0f} MiB"
        return f"{self.clients} clients x {self.rows}x{self.features}, {self.steps} steps, {data}"


CASES = {"A": Case(10_000, 32, 64, 10), "B": Case(4_096, 64, 256, 50)}


class Problem:
    """A case with its data: the first model (features,), and x and y of all clients."""

    def __init__(self, case: Case, options: dict[str, Any]):
        rng = np.random.default_rng(0)
        self.case, self.options = case, options
        self.w = np.zeros(case.features, np.float32)
        self.x = rng.standard_normal((case.clients, case.rows, case.features), np.float32)
        self.y = self.x @ rng.standard_normal(case.features, np.float32)


def local_sgd(case: Case) -> Callable[..., Any]:
    """What one client does: (w, x, y) to its own model."""
    import jax
    import jax.numpy as jnp

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return 0.5 * jnp.mean((x @ w - y) ** 2)

    def train(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, case.steps, lambda _, w: w - RATE * jax.grad(loss)(w, x, y), w)

    return train


def program(case: Case) -> Callable[..., Any]:
    """The whole computation as a program of beamjax."""
    import beamjax as bj

    @bj.program(clients=case.clients)
    def mean_model(w: Any, x: Any, y: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(local_sgd(case), (bj.broadcast(w), x, y)))

    return mean_model


def planned_shard_size(problem: Problem) -> int:
    """Clients in a shard of beamjax's plan, which the loop and BatchElements use as well."""
    import beamjax as bj

    arrays, options = (problem.w, problem.x, problem.y), problem.options
    plan = bj.explain(program(problem.case), *arrays, options=options).to_json()
    shared.shard_size = plan["placements"][0]["shard_size"]
    return shared.shard_size


# --- the ways to compute it; each takes a problem and gives a call that does it once


def whole_array(problem: Problem) -> Call:
    import jax

    call = jax.jit(program(problem.case))
    return lambda: call(problem.w, problem.x, problem.y)


def shard_loop(problem: Problem) -> Call:
    """Tuned by hand: a shard summed on the device, the running sum in float64."""
    import jax

    w, x, y, size = problem.w, problem.x, problem.y, planned_shard_size(problem)
    train = jax.vmap(local_sgd(problem.case), (None, 0, 0))
    shard_sum = jax.jit(lambda w, x, y: train(w, x, y).sum(axis=0))

    def run() -> np.ndarray:
        total = np.zeros(w.shape)
        for i in range(0, len(x), size):
            total += np.asarray(shard_sum(w, x[i : i + size], y[i : i + size]))
        return (total / len(x)).astype(w.dtype)

    return run


def evaluate(problem: Problem, runner: str = "local") -> Call:
    import beamjax as bj

    mean_model, arrays = program(problem.case), (problem.w, problem.x, problem.y)
    return lambda: bj.run(mean_model, *arrays, runner=runner, options=problem.options)


def direct_runner(problem: Problem) -> Call:
    import apache_beam  # noqa: F401  (2 s that are not the first call's)

    return evaluate(problem, "DirectRunner")


def per_element(problem: Problem) -> Call:
    import apache_beam  # noqa: F401
    import jax

    shared.problem, shared.function = problem, jax.jit(local_sgd(problem.case))
    return lambda: run_pipeline(None)


def batch_elements(problem: Problem) -> Call:
    import apache_beam  # noqa: F401
    import jax

    train = jax.vmap(local_sgd(problem.case), (None, 0, 0))
    shared.problem = problem
    shared.function = jax.jit(lambda w, x, y: train(w, x, y).sum(axis=0))
    size = planned_shard_size(problem)
    return lambda: run_pipeline(size)


def run_pipeline(batch: int | None) -> np.ndarray:
    """The mean model by hand; an element is the number of a client, or a list of them."""
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    class MeanFn(beam.CombineFn):
        def create_accumulator(self) -> Any:
            return np.float64(0), 0

        def add_input(self, accumulator: Any, element: Any) -> Any:
            return accumulator[0] + element[0], accumulator[1] + element[1]

        def merge_accumulators(self, accumulators: Any) -> Any:
            totals, counts = zip(*accumulators, strict=True)
            return sum(totals), sum(counts)

        def extract_output(self, accumulator: Any) -> Any:
            return accumulator[0] / accumulator[1]

    with beam.Pipeline(FnApiRunner(), PipelineOptions([])) as pipeline:
        clients = pipeline | beam.Create(range(shared.problem.case.clients))
        if batch is None:
            models = clients | beam.Map(model_of)
        else:
            batches = clients | beam.BatchElements(min_batch_size=batch, max_batch_size=batch)
            models = batches | beam.Map(models_of)
        models | beam.CombineGlobally(MeanFn()).without_defaults() | beam.Map(keep)
    return shared.mean.astype(np.float32)


def model_of(client: int) -> tuple[np.ndarray, int]:
    w, x, y = shared.problem.w, shared.problem.x[client], shared.problem.y[client]
    return np.asarray(shared.function(w, x, y)), 1


def models_of(clients: list[int]) -> tuple[np.ndarray, int]:
    w, x, y = shared.problem.w, shared.problem.x[clients], shared.problem.y[clients]
    return np.asarray(shared.function(w, x, y)), len(clients)


def keep(mean: np.ndarray) -> None:
    shared.mean = mean


LOOP, DIRECT = "shard loop in process", "beamjax on DirectRunner"
ELEMENT, BATCH = "Beam, per element", "Beam, BatchElements"
WAYS: dict[str, Callable[[Problem], Call]] = {
    "whole-array jit": whole_array,
    LOOP: shard_loop,
    "beamjax in process": evaluate,
    DIRECT: direct_runner,
    ELEMENT: per_element,
    BATCH: batch_elements,
}

# --- a process for each way


def serve() -> None:
    """Does what the launcher asks for on stdin, a line of JSON each; answers on stdout."""
    logging.basicConfig(level=logging.ERROR)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print
    job = json.loads(input())
    problem = Problem(Case(**job["case"]), job["options"])
    call = WAYS[job["way"]](problem)
    print(json.dumps({"start_mib": peak_mib()}), file=answers)
    for line in sys.stdin:
        seconds, answer = timed(call, json.loads(line))
        found = {"seconds": seconds, "answer": answer.tolist(), "peak_mib": peak_mib()}
        print(json.dumps(found | {"shard_size": shared.shard_size}), file=answers)


def timed(call: Call, at_least: float) -> tuple[float, np.ndarray]:
    """Seconds of a call, the median of as many as it takes to fill a time; and the answer."""
    times: list[float] = []
    while not times or sum(times) < at_least:
        start = time.perf_counter()
        answer = np.asarray(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times), answer


def peak_mib() -> float:
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class Worker:
    """The process of one way."""

    def __init__(self, way: str, case: Case, options: dict[str, Any]):
        self.way = way
        folder = str(Path(__file__).resolve().parent)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        env = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": path}
        # Not run as a script: Beam would pickle the functions of `__main__` with their data.
        command, pipe = [sys.executable, "-c", "import overhead; overhead.serve()"], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self.tell({"way": way, "case": dataclasses.asdict(case), "options": options})

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.way}: its process ended with code {self.process.wait()}")
        return json.loads(line)

    def round(self, seconds: float) -> dict[str, Any]:
        self.tell(seconds)
        return self.hear()


# --- the measurement


def measure(case: Case, flags: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All rounds of a case: a row for each way, and the shard size."""
    task = progress.add_task(str(case), total=len(WAYS) * (2 + flags.rounds))
    options = {"shard_size": flags.shard_size} if flags.shard_size else {}
    workers = [Worker(way, case, options) for way in WAYS]

    def each(ask: Callable[[Worker], dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for worker in workers:
            found.append(ask(worker))
            progress.update(task, advance=1, refresh=True)
        return found

    try:
        ready = each(Worker.hear)
        first = each(lambda worker: worker.round(0.0))
        rounds = [each(lambda worker: worker.round(flags.seconds)) for _ in range(flags.rounds)]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.communicate()
    rows = []
    for i, way in enumerate(WAYS):
        seconds = [found[i]["seconds"] for found in rounds]
        difference = np.subtract(rounds[-1][i]["answer"], first[0]["answer"])
        row = {"way": way, "seconds": statistics.median(seconds), "rounds": seconds}
        row |= {"first_seconds": first[i]["seconds"], "peak_mib": rounds[-1][i]["peak_mib"]}
        row |= {"start_mib": ready[i]["start_mib"], "difference": float(abs(difference).max())}
        rows.append(row)
    size = next(filter(None, (found["shard_size"] for found in first)))
    return {"case": dataclasses.asdict(case), "shard_size": size, "rows": rows}


def aims(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How beamjax on DirectRunner stands to the loop and to the hand-written pipelines."""
    seconds = {row["way"]: row["seconds"] for row in rows}
    direct, limit = seconds[DIRECT], MAX_RATIO * seconds[LOOP] + MAX_SECONDS
    aim = f"{MAX_RATIO} x the loop + {MAX_SECONDS} s = {limit:.2f} s"
    lines = [f"{DIRECT}: {direct:.2f} s, aim {aim}: {'met' if direct <= limit else 'NOT MET'}"]
    for way in (ELEMENT, BATCH):
        ahead = "ahead" if direct < seconds[way] else "NOT AHEAD"
        lines.append(f"{DIRECT} takes {direct / seconds[way]:.2f} x {way}: {ahead}")
    return lines


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("way", box=box.SIMPLE_HEAD)
    for column in ("seconds", "x loop", "first", "peak", "start", "differs"):
        table.add_column(column, justify="right", no_wrap=True)
    loop = next(row["seconds"] for row in rows if row["way"] == LOOP)
    for row in rows:
        table.add_row(
            row["way"], f"{row['seconds']:.3f}", f"{row['seconds'] / loop:.2f}",
            f"{row['first_seconds']:.2f}", f"{row['peak_mib']:.0f}", f"{row['start_mib']:.0f}",
            f"{row['difference']:.1e}",
        )  # fmt: skip
    return table


def machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": platform.machine(),
        "cores": cores,
        "load average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("beamjax", "jax", "apache-beam", "numpy")},
    }


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default="A,B", help="of A and B, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="after the first call, 1 or more")
    parser.add_argument("--seconds", type=float, default=0.5, help="calls fill so long in a round")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of clients")
    parser.add_argument("--shard-size", type=int, help="instead of the one that beamjax plans")
    parser.add_argument("--json", type=Path, help="a file to write everything to")
    flags = parser.parse_args(argv)
    flags.cases = flags.cases.split(",")
    if not set(flags.cases) <= set(CASES):
        parser.error(f"--cases: found {flags.cases}, expected some of {list(CASES)}")
    if flags.rounds < 1:
        parser.error(f"--rounds: found {flags.rounds}, expected 1 or more")
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    flags, before = parse_flags(argv), machine()
    print(", ".join(f"{key} {value}" for key, value in before.items()))
    results = {}
    for name in flags.cases:
        clients = max(1, round(CASES[name].clients * flags.scale))
        case = dataclasses.replace(CASES[name], clients=clients)
        with Progress(console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
            results[name] = measure(case, flags, progress)
        print(f"\n{name}: {case}, {results[name]['shard_size']} clients in a shard")
        Console().print(as_table(results[name]["rows"]))
        print(*aims(results[name]["rows"]), sep="\n")
    print(f"{LEGEND}\nload average at the end {os.getloadavg()[0]:.1f}")
    if flags.json:
        flags.json.write_text(json.dumps({**before, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
