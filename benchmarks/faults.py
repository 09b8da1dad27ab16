"""Kills on a Flink cluster: a run ends with the same bits, or with an error that says why.

    python benchmarks/faults.py --kills=20 --seed=0 --kinds=worker,taskmanager,launcher

Starts a cluster of its own and runs one training again and again, each time with a SIGKILL at a
random moment of a random kind of process:

    worker        the pool that computes the shards of a task manager
    taskmanager   one of Flink
    launcher      the process that called beamjax.run, with checkpoints; it is called again

The supervisor of the cluster, which `beamjax flink up` runs as well, starts other workers and task
managers.

    python benchmarks/faults.py --session --kills=20 --rounds=500

Calls the round of the same training from this process, in one session, with kills of the first
two kinds at random moments. Compares the bits of each round with `runner="local"`, and prints the
seconds of each round with a kill.

Exits with 1 if a run gave other bits, did not end, or ended with an error that is not beamjax's, or
if something is left of a run that ended by itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAME, NAMED = "same bits", "named error"
WRONG, HUNG, UNNAMED, AGAIN = "WRONG", "HUNG", "UNNAMED ERROR", "ROUNDS RUN AGAIN"
"""How an attempt ends; those in capitals must not be."""
_SECONDS_TO_RESTART = 90.0
"""Seconds in which a cluster is complete again."""

# --- the run, in a process of its own


class Run:
    """A launcher as a child process, which may be killed and started again."""

    def __init__(self, steps: int, runner: str, options: dict[str, Any], errors: Path):
        self.call = f"faults_job.launch({steps}, {runner!r}, {options!r})"
        self.errors = errors
        self.begun = threading.Event()
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it has imported what it needs."""
        folder = str(Path(__file__).resolve().parent)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        env = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": path}
        command = [sys.executable, "-c", f"import faults_job; {self.call}"]
        with open(self.errors, "ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def ends_within(self, seconds: float) -> bool:
        try:
            self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def told(self) -> dict[str, Any]:
        """How it ended, as `faults_job.launch` says it; nothing if it did not."""
        lines = self.process.communicate()[0].splitlines()
        return dict(json.loads(lines[-1])) if lines else {}


# --- the cluster


class Cluster:
    """A Flink cluster of two task managers, which runs in this process."""

    def __init__(self, supervisor: Any):
        self.supervisor = supervisor
        self.flags = {"flink_cluster": str(supervisor.folder), "parallelism": 2}

    def wait(self) -> None:
        """Waits until each server that ended has been replaced."""
        from beamjax.pipelines.clusters import flink_cluster

        end = time.monotonic() + _SECONDS_TO_RESTART
        while lacks := flink_cluster.incomplete(self.supervisor.cluster):
            if time.monotonic() > end:
                sys.exit(f"the cluster is not complete after {_SECONDS_TO_RESTART:.0f} s: {lacks}")
            time.sleep(0.2)

    def strike(self, kind: str, number: int) -> str:
        """Kills a server of the cluster; returns its name."""
        name = f"{'taskmanager' if kind == 'taskmanager' else 'workers'}-{number}"
        pid = self.supervisor.servers[name].process.pid
        os.killpg(pid, signal.SIGKILL)  # with its guard
        return f"{name}, process {pid}"

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {one["jid"]: one for one in self._ask("/jobs/overview")["jobs"]}

    def tasks_again(self, jobs: Sequence[str]) -> int:
        """How many tasks of these jobs Flink has started again."""
        return sum(
            task["attempt"]
            for job in jobs
            for vertex in self._ask(f"/jobs/{job}")["vertices"]
            for task in self._ask(f"/jobs/{job}/vertices/{vertex['id']}")["subtasks"]
        )

    def _ask(self, path: str) -> Any:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(
            f"http://localhost:{self.supervisor.cluster.rest_port}{path}", timeout=10
        ) as answer:
            return json.load(answer)


@contextlib.contextmanager
def started(folder: Path, slots: int, attempts: int | None) -> Iterator[Cluster]:
    from beamjax.pipelines.clusters import flink_cluster, flink_supervisor

    given = {} if attempts is None else {"attempts": attempts}
    settings = flink_cluster.Settings(taskmanagers=2, slots=slots, **given)
    with flink_supervisor.running(folder, settings) as supervisor:
        yield Cluster(supervisor)


# --- attempts


@dataclass
class Kill:
    """What is to be killed and when, in seconds from the call of `run`."""

    kind: str
    moment: float
    number: int


@dataclass
class Attempt:
    """A run with its kills, and how it ended."""

    kills: list[Kill]
    struck: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tasks_again: int = 0
    outcome: str = ""
    message: str = ""

    def line(self, number: int) -> str:
        kinds = "+".join(kill.kind for kill in self.kills)
        moments = "+".join(f"{kill.moment:.1f}" for kill in self.kills)
        cells = f"{number:3}  {kinds:12} {moments:>7} {self.seconds:8.1f} {self.tasks_again:12}"
        struck = ", ".join(self.struck) or "nothing: it had ended"
        return f"{cells}   {self.outcome:12} {struck} {self.message}".rstrip()


HEADER = f"{'':3}  {'kind':12} {'at, s':>7} {'ended, s':>8} {'tasks again':>12}   outcome"


@dataclass
class Soak:
    """What all attempts share."""

    cluster: Cluster
    folder: Path  # for checkpoints and logs
    steps: int  # of each client and round
    limit: float  # seconds after which a run counts as hung
    bits: str = ""  # of the result of an undisturbed run
    usual: dict[bool, float] = field(default_factory=dict)  # its seconds, by: with checkpoints?
    saved: int = 0  # how often it saves its state

    def attempt(self, kills: list[Kill]) -> Attempt:
        """A run in which some processes are killed."""
        attempt = Attempt(sorted(kills, key=lambda kill: kill.moment))
        saving = any(kill.kind == "launcher" for kill in kills)
        known = set(self.cluster.jobs())
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            checkpoint = Path(name) / "checkpoint"
            options = self.cluster.flags | ({"checkpoint": str(checkpoint)} if saving else {})
            run = Run(self.steps, "FlinkRunner", options, self.folder / "runs.log")
            begun = time.monotonic()
            try:
                for kill in attempt.kills:
                    if run.ends_within(kill.moment - (time.monotonic() - begun)):
                        break
                    attempt.struck.append(self.strike(kill, run, checkpoint))
                ended = run.ends_within(self.limit - (time.monotonic() - begun))
            finally:
                run.process.kill()
            attempt.seconds = time.monotonic() - begun
            attempt.outcome, attempt.message = self.judge(run, ended, checkpoint)
        if not attempt.struck and attempt.outcome == SAME:
            self.usual[saving] = attempt.seconds  # Java gets warm, and the machine less busy
        self.cluster.wait()  # the run may be faster than the start of another server
        attempt.tasks_again = self.cluster.tasks_again(sorted(set(self.cluster.jobs()) - known))
        return attempt

    def strike(self, kill: Kill, run: Run, checkpoint: Path) -> str:
        if kill.kind == "launcher":
            run.kill()
            saved = last_saved(checkpoint)
            run.start()
            return f"process {run.process.pid}, {saved} of {self.saved} saved"
        return self.cluster.strike(kill.kind, kill.number)

    def judge(self, run: Run, ended: bool, checkpoint: Path) -> tuple[str, str]:
        told = run.told()
        if not ended:
            return HUNG, f"after {self.limit:.0f} s"
        if "error" in told:
            return NAMED, told["error"].splitlines()[0][:150]
        if "bits" not in told:
            return UNNAMED, f"see {self.folder / 'runs.log'}"
        if told["bits"] != self.bits:
            return WRONG, told["bits"]
        if checkpoint.exists() and last_saved(checkpoint) != self.saved:
            return AGAIN, f"{last_saved(checkpoint)} saved"
        return SAME, ""


def last_saved(checkpoint: Path) -> int:
    """How many checkpoints a run has made, the one that was killed before it included."""
    return max((int(path.stem) for path in checkpoint.glob("*.checkpoint")), default=0)


def reference(soak: Soak) -> None:
    """The bits that are right, by this process alone, and the time of undisturbed runs."""
    run = Run(soak.steps, "local", {}, soak.folder / "runs.log")
    told = run.told()
    if not told.get("differs", 1.0) < 1e-4:
        sys.exit(f"runner='local' and jit differ: {told}; see {soak.folder / 'runs.log'}")
    soak.bits = told["bits"]
    print(f"runner='local' against jit: largest relative difference {told['differs']:.1e}")
    for saving in (False, False, True):  # the first one has a cold Java
        with tempfile.TemporaryDirectory(dir=soak.folder) as name:
            checkpoint = Path(name) / "checkpoint"
            options = soak.cluster.flags | ({"checkpoint": str(checkpoint)} if saving else {})
            run = Run(soak.steps, "FlinkRunner", options, soak.folder / "runs.log")
            begun = time.monotonic()
            ended = run.ends_within(soak.limit)
            soak.usual[saving] = time.monotonic() - begun
            run.process.kill()
            soak.saved = last_saved(checkpoint)
            outcome, message = soak.judge(run, ended, checkpoint)
            if outcome != SAME:
                sys.exit(f"without any kill: {outcome} {message}; see {soak.folder / 'runs.log'}")
    print(
        f"undisturbed on Flink: {soak.usual[False]:.1f} s without checkpoints, "
        f"{soak.usual[True]:.1f} s with {soak.saved} checkpoints"
    )


def draws(rng: random.Random, flags: argparse.Namespace, usual: dict[bool, float]) -> list[Kill]:
    kinds = [rng.choice(flags.kinds) for _ in range(flags.kills_per_run)]
    span = usual["launcher" in kinds]
    return [Kill(kind, rng.uniform(0, span), rng.randrange(2)) for kind in kinds]


# --- kills in a session


@dataclass
class Delay:
    """A kill in a session: what was killed in which round, and the seconds of that round."""

    kind: str
    round: int
    struck: str
    seconds: float


def session_rounds(flags: argparse.Namespace, cluster: Cluster) -> tuple[list[float], list[Delay]]:
    """Rounds in one session on Flink; the seconds of those without kills, and the kills."""
    # A round with a kill lasts until the first round after the kill ends, since a kill may come
    # when the results of a round are already there.
    import faults_job
    import numpy as np

    import beamjax as bj

    one_round = faults_job.training_round(flags.steps)
    w, momentum, x, y = faults_job.arguments()
    rng = random.Random(flags.seed)
    every = flags.rounds // flags.kills
    kinds = [kind for kind in flags.kinds if kind != "launcher"]
    at = {number * every + rng.randrange(every): rng.choice(kinds) for number in range(flags.kills)}
    usual: list[float] = []
    delays: list[Delay] = []
    options = {"shard_size": faults_job.SHARD}

    def strike(kind: str, number: int, struck: list[str]) -> None:
        struck.append(cluster.strike(kind, number))

    with bj.session("FlinkRunner", options=cluster.flags | options) as session:
        for number in range(-2, flags.rounds):  # two rounds start the job and compile
            expected = bj.run(one_round, w, momentum, x, y, runner="local", options=options)
            kind = at.get(number)
            struck: list[str] = []
            if kind is not None:
                cluster.wait()
                moment = rng.uniform(0, 2 * statistics.median(usual or [0.02]))
                killer = threading.Timer(moment, strike, (kind, rng.randrange(2), struck))
                killer.start()
            begun = time.monotonic()
            found = session.run(one_round, w, momentum, x, y)
            if kind is not None and not struck:
                killer.join()
                found = session.run(one_round, w, momentum, x, y)
            seconds = time.monotonic() - begun
            pairs = zip(jax_leaves(found), jax_leaves(expected), strict=True)
            if not all(np.array_equal(one, other) for one, other in pairs):
                sys.exit(f"round {number} has other bits than with runner='local', after {struck}")
            w, momentum = expected[:2]
            if kind is not None:
                delays.append(Delay(kind, number, struck[0], seconds))
                print(f"{number:5}  {kind:12} {seconds:8.3f}   {struck[0]}", flush=True)
            elif number >= 0:
                usual.append(seconds)
    return usual, delays


def jax_leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


def session_soak(flags: argparse.Namespace, folder: Path) -> None:
    """Prints the delays of kills in a session."""
    with started(folder / "cluster", flags.slots, flags.attempts or flags.kills * 8) as cluster:
        print(f"{'round':>5}  {'kind':12} {'took, s':>8}   killed", flush=True)
        usual, delays = session_rounds(flags, cluster)
    print(f"{flags.rounds} rounds with the bits of runner='local', {len(delays)} kills")
    middle, longest = statistics.median(usual), max(usual)
    print(f"rounds without a kill: median {middle:.3f} s, longest {longest:.3f} s")
    for kind in sorted({delay.kind for delay in delays}):
        took = [delay.seconds for delay in delays if delay.kind == kind]
        print(f"{kind}: median {statistics.median(took):.3f} s, longest {max(took):.3f} s")


# --- what is left


def strays(folder: Path) -> Iterator[str]:
    """Processes that were started below this one and still live, by their environment."""
    for path in Path("/proc").glob("[0-9]*"):  # nothing where there is no such folder
        try:
            environment = (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(path.name) != os.getpid() and f"TMPDIR={folder}".encode() in environment:
            yield f"process {path.name}: {command[:100]}"


def lasting_strays(folder: Path) -> list[str]:
    """Those that are still there when all had time to end."""
    # What cancels the pipelines of a killed launcher looks for more of them for half a minute.
    end = time.monotonic() + 45
    while (found := list(strays(folder))) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def leftovers(folder: Path) -> list[str]:
    """Temporary files; not empty folders, which Beam leaves of a pipeline that was killed."""
    found = (path for path in folder.iterdir() if path.is_file() or any(path.iterdir()))
    return sorted(path.name for path in found)


# --- command


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = ["worker", "taskmanager", "launcher"]
    parser.add_argument("--kills", type=int, default=20, help="in all")
    parser.add_argument("--kills-per-run", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments")
    parser.add_argument("--kinds", default=",".join(kinds), help="separated by commas")
    parser.add_argument("--attempts", type=int, help="of Flink (default: as beamjax flink up)")
    parser.add_argument("--slots", type=int, default=1, help="of each of two task managers")
    parser.add_argument("--session", action="store_true", help="rounds of one session")
    parser.add_argument("--rounds", type=int, default=500, help="of the session")
    parser.add_argument(
        "--steps", type=int, help="of each client in a round (1500; 5 in a session)"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds until a run is hung")
    flags = parser.parse_args(argv)
    flags.kinds = flags.kinds.split(",")
    flags.steps = flags.steps or (5 if flags.session else 1500)
    if not set(flags.kinds) <= set(kinds):
        parser.error(f"--kinds: found {flags.kinds}, expected some of {kinds}")
    if min(flags.kills, flags.kills_per_run) < 1:
        parser.error("--kills, --kills-per-run: expected 1 or more")
    return flags


def soaked(flags: argparse.Namespace, folder: Path) -> list[Attempt]:
    """All attempts, printed as they end."""
    attempts: list[Attempt] = []
    rng = random.Random(flags.seed)
    with started(folder / "cluster", flags.slots, flags.attempts) as cluster:
        soak = Soak(cluster, folder, flags.steps, flags.limit)
        reference(soak)
        left = leftovers(folder / "tmp")
        if left:
            sys.exit(f"without any kill: {left} are left in the temporary folder")
        print(f"\n{HEADER}", flush=True)
        while sum(len(attempt.struck) for attempt in attempts) < flags.kills:
            attempt = soak.attempt(draws(rng, flags, soak.usual))
            attempts.append(attempt)
            print(attempt.line(len(attempts)), flush=True)
            if attempt.outcome == HUNG:  # the next one would find what this one left
                break
    return attempts


def main(argv: Sequence[str] | None = None) -> int:
    from suite.machine import machine

    flags = parse_flags(argv)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    with tempfile.TemporaryDirectory(prefix="beamjax-faults-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        start = time.monotonic()
        if flags.session:
            session_soak(flags, folder)
            return 0
        attempts = soaked(flags, folder)
        found = lasting_strays(folder)
        print(f"\nprocesses left: {found or 'none'}")
        print(f"temporary files of what was killed: {leftovers(folder / 'tmp') or 'none'}")
        bad = [attempt for attempt in attempts if attempt.outcome.isupper()]
        if bad:
            print((folder / "runs.log").read_text(errors="replace")[-8000:])
    told = collections.Counter(attempt.outcome for attempt in attempts)
    kills = sum(len(attempt.struck) for attempt in attempts)
    told_text = ", ".join(f"{count} {outcome}" for outcome, count in told.items())
    print(f"{kills} kills in {len(attempts)} runs, {time.monotonic() - start:.0f} s: {told_text}")
    print(f"load average at the end {os.getloadavg()[0]:.1f}")
    return 1 if bad or found else 0


if __name__ == "__main__":
    sys.exit(main())
