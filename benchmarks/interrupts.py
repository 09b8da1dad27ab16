"""Interrupts at random moments: Ctrl-C ends a run within two seconds and leaves nothing behind.

    python benchmarks/interrupts.py --runner=DirectRunner --count=20 --seed=0

Starts a process again and again, which calls `beamjax.run` on a program of one pass and on one with
rounds, `launch` and `result`, a session, or the command `beamjax run`, and sends it SIGINT at a
random moment from its start to its end. After that it checks:

    seconds   from the signal to `KeyboardInterrupt`, or to the end of the command
    exit      by SIGINT, or 130 of the command
    state     of the job: cancelled, or none if it had not begun, or done if it had ended; or
              "imports" before beamjax and JAX were imported. What the extensions of NumPy and JAX
              make of an interrupt then (an ImportError, say) is not checked
    left      temporary files, processes, and jobs on the Flink cluster
    text      on stderr: no abort, no worker that died, no swallowed error

On FlinkRunner it starts a cluster of its own. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
import numpy as np

KINDS = ("run", "rounds", "launch", "session", "command")
JOB = Path(__file__).resolve().parent / "interrupts_job.py"
BAD = ("WorkerError", "Fatal", "terminate called", "Aborted", "Exception ignored", "may have died")
"""What stderr must not say."""
SECONDS_TO_LEAVE = {"FlinkRunner": 40.0}
"""Seconds after the end of a process until nothing of it is left, if not 5. A job server may still
submit a job, which a process beside it waits for and cancels."""


@dataclass
class Interrupt:
    """One interrupted process, and what was wrong with its end."""

    kind: str
    moment: float
    seconds: float = 0.0
    to_end: float = 0.0
    state: str = ""
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"{self.kind:8} {self.moment:7.2f} {self.seconds:8.2f} {self.to_end:7.2f}  "
            f"{self.state:10} {'; '.join(self.wrong) or 'ok'}"
        )


HEADER = f"{'call':8} {'at, s':>7} {'raised,s':>8} {'end, s':>7}  {'state':10}"


@dataclass
class Interrupts:
    """Interrupts of processes that run on one runner."""

    runner: str
    options: dict[str, Any]
    folder: Path
    limit: float
    cluster: faults.Cluster | None = None
    usual: dict[str, float] = field(default_factory=dict)
    """Seconds of a process of each kind that is not interrupted."""

    def command(self, kind: str, job: Path) -> list[str]:
        if kind != "command":
            return [sys.executable, str(JOB), kind, self.runner, json.dumps(self.options), str(job)]
        x = self.folder / "x.npy"
        if not x.exists():
            np.save(x, np.full((256, 64, 64), 0.1, np.float32))
        flags = [f"--{name}={value}" for name, value in self.options.items()]
        return [
            sys.executable, "-m", "beamjax", "run", f"{JOB}:slow", "--arg", f"x={x}",
            f"--runner={self.runner}", f"--job_folder={job}", "--shard_size=16", *flags,
        ]  # fmt: skip

    @contextlib.contextmanager
    def started(self, kind: str, job: Path, tmp: Path) -> Iterator[subprocess.Popen[str]]:
        tmp.mkdir()
        process = subprocess.Popen(
            self.command(kind, job), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={"JAX_PLATFORMS": "cpu"} | os.environ | {"TMPDIR": str(tmp)},
            # A shell lets its background processes ignore the signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def undisturbed(self, kind: str) -> float:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            begun = time.monotonic()
            with self.started(kind, Path(name) / "job", Path(name) / "tmp") as process:
                text = process.communicate(timeout=300)[1]
            if process.returncode:
                sys.exit(f"{kind} without an interrupt: exit {process.returncode}\n{text}")
            return time.monotonic() - begun

    def interrupt(self, kind: str, moment: float) -> Interrupt | None:
        """Interrupts a process; None if it had ended before."""
        found = Interrupt(kind, moment)
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            job, tmp = Path(name) / "job", Path(name) / "tmp"
            with self.started(kind, job, tmp) as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(moment)
                    return None
                at = time.monotonic()
                process.send_signal(signal.SIGINT)
                try:
                    out, err = process.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    found.wrong.append("HUNG")
                    return found
                found.to_end = time.monotonic() - at
            found.state = self.state(job, found)
            self.judge(found, process.returncode, out, err, at)
            found.wrong += self.left(tmp)
        return found

    def judge(self, found: Interrupt, code: int, out: str, err: str, at: float) -> None:
        told = out.split()
        found.seconds = found.to_end
        in_import = "ImportError" in err and "KeyboardInterrupt" in err
        if in_import if found.kind == "command" else "imported" not in told:
            found.state, found.seconds = "imports", 0.0
            return
        if "interrupted" in told:
            found.seconds = float(told[-1]) - at
        if found.seconds > self.limit:
            found.wrong.append(f"took {found.seconds:.1f} s")
        expected = (130, -signal.SIGINT) if found.kind == "command" else (-signal.SIGINT,)
        ended = "done" in told and float(told[-1]) <= at + 0.1
        if code not in expected and not (ended and code == 0):
            found.wrong.append(f"exit {code}")
        # Python raises none while it is being finalized.
        is_over = ended or found.state == "done"
        # After an interrupt in a string that `exec` runs, as in dataclasses, Python ends by the
        # signal, whatever the exit status.
        is_named = "KeyboardInterrupt" in err or "beamjax: interrupted" in err
        if code == -signal.SIGINT and not is_named and not is_over:
            found.wrong.append("ended without KeyboardInterrupt")
        said = [word for word in BAD if word in err]
        if said or found.wrong:
            found.wrong.append(f"stderr: {' '.join(err.split())[-600:]}")

    def state(self, job: Path, found: Interrupt) -> str:
        import beamjax as bj

        try:
            state = bj.open_job(job).state
        except bj.JobError:
            return "none"
        if state not in (bj.JobState.CANCELLED, bj.JobState.DONE):
            found.wrong.append(f"state {state.value}")
        return state.value

    def left(self, tmp: Path) -> list[str]:
        end = time.monotonic() + SECONDS_TO_LEAVE.get(self.runner, 5.0)
        found = ["?"]
        while found and time.monotonic() < end:
            found = [f"left {one}" for one in (*faults.strays(tmp), *faults.leftovers(tmp))]
            found += [] if self.cluster is None else [
                f"job {one['state']} on the cluster" for one in self.cluster.jobs().values()
                if one["state"] not in ("FINISHED", "FAILED", "CANCELED")
            ]  # fmt: skip
            time.sleep(0.1)
        return found


def interrupts(flags: argparse.Namespace, folder: Path) -> list[Interrupt]:
    cluster = None
    options = {name: value for name, _, value in (one.partition("=") for one in flags.option)}
    with contextlib.ExitStack() as stack:
        if flags.runner == "FlinkRunner":
            cluster = stack.enter_context(faults.started(folder / "cluster", 1, None))
            options |= cluster.flags
        here = Interrupts(flags.runner, options, folder, flags.limit, cluster)
        for kind in flags.kinds:
            here.usual[kind] = here.undisturbed(kind)
        print("undisturbed:", ", ".join(f"{k} {s:.1f} s" for k, s in here.usual.items()))
        print(HEADER, flush=True)
        rng = random.Random(flags.seed)
        found: list[Interrupt] = []
        while len(found) < flags.count:
            kind = flags.kinds[len(found) % len(flags.kinds)]
            one = here.interrupt(kind, rng.uniform(0.05, here.usual[kind]))
            if one is not None:
                found.append(one)
                print(one.line(), flush=True)
        return found


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runner", default="DirectRunner")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, repeatable")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds until it is too late")
    flags = parser.parse_args(argv)
    flags.kinds = flags.kinds.split(",")
    if not set(flags.kinds) <= set(KINDS):
        parser.error(f"--kinds: found {flags.kinds}, expected some of {KINDS}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    from suite.machine import machine

    flags = parse_flags(argv)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    with tempfile.TemporaryDirectory(prefix="beamjax-interrupts-") as name:
        found = interrupts(flags, Path(name))
    bad = [one for one in found if one.wrong]
    times = [one.seconds for one in found]
    print(
        f"{len(found)} interrupts on {flags.runner}, {len(bad)} of them wrong; seconds to "
        f"KeyboardInterrupt: median {statistics.median(times):.2f}, longest {max(times):.2f}; "
        f"to the end: longest {max(one.to_end for one in found):.2f}"
    )
    print(f"load average at the end {os.getloadavg()[0]:.1f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
