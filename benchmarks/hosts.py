"""Four hosts on one machine, and what may happen to them while a run is on.

    python benchmarks/hosts.py                      # all scenarios, then 20 random ones
    python benchmarks/hosts.py --only "launcher killed" "flink_master" --random=0

The hosts are network, mount, UTS and PID namespaces of this machine, so this needs root. Host a
has Flink's job manager and Beam's job server, b and c a task manager and a pool of workers each,
and d the launcher. Hosts b and c have the same name. They share one folder. Nothing leaves the
namespaces.

Each scenario runs a pass of 64 shards, rounds, or a session, does something to the hosts, and
checks the bits, the message of an error, and that nothing is left: no job of Flink, and nothing in
the shared folder. Exits with 1 if a result is wrong, a run hangs, or something is left. Where
namespaces can't be made, it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NET, PREFIX = "10.77.0", f"beamjax{os.getpid()}"
HOSTS = {"a": 1, "b": 2, "c": 3, "d": 4}
LIMIT = 300.0
"""Seconds after which a run counts as hung."""
OWN_MIB = 512
"""Size of the temporary folder of each host."""
SECONDS_TO_CLEAN = 60.0
"""Seconds in which nothing may be left of a run."""

Process = subprocess.Popen  # type: ignore[type-arg]


# --- hosts


class Hosts:
    """Four hosts, with a folder for what they share, and one for what each has for itself."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shared, self.own = folder / "shared", folder / "own"
        self._inits: dict[str, Process] = {}
        self._services: dict[str, Process] = {}

    def up(self) -> None:
        """Makes the hosts."""
        self.shared.mkdir()
        self.own.mkdir()
        (self.folder / "logs").mkdir()
        names = "".join(f"{NET}.{number} host{host}\n" for host, number in HOSTS.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost worker\n{names}")
        net = f"{PREFIX}-net"
        _do("ip", "netns", "add", net)
        _do("ip", "-n", net, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", net, "link", "set", "br0", "up")
        for host in HOSTS:
            self._up(host, net)

    def _up(self, host: str, net: str) -> None:
        space, own = f"{PREFIX}-{host}", self.folder / f"own-{host}"
        own.mkdir()
        _do("ip", "netns", "add", space)
        _do("ip", "-n", net, "link", "add", f"v-{host}", "type", "veth",
            "peer", "name", "eth0", "netns", space)  # fmt: skip
        _do("ip", "-n", net, "link", "set", f"v-{host}", "master", "br0", "up")
        _do("ip", "-n", space, "addr", "add", f"{NET}.{HOSTS[host]}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _do("ip", "-n", space, "link", "set", device, "up")
        name = "worker" if host in "bc" else f"host{host}"
        prepare = (
            f"hostname {name}; mount -t proc proc /proc; "
            f"mount --bind {self.folder}/hosts /etc/hosts; "
            f"mount --bind {self.shared} {self.shared}; "
            f"mount -t tmpfs -o size={OWN_MIB}m tmpfs {self.own}; "
            f"touch {own}/ready; while :; do sleep 3600 & wait $!; done"
        )
        command = ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", "--pid", "--fork",
                   "--kill-child", "--propagation", "private", "bash", "-c", prepare]  # fmt: skip
        self._inits[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        _wait(lambda: (own / "ready").exists(), 20)

    def down(self) -> None:
        """Removes the hosts with all their processes."""
        for process in (*self._services.values(), *self._inits.values()):
            process.kill()  # and with an init, all that runs on its host
            process.wait()
        for name in (*HOSTS, "net"):
            subprocess.run(["ip", "netns", "del", f"{PREFIX}-{name}"], check=False)

    def on(self, host: str, command: Sequence[str], log: str, **options: Any) -> Process:
        """Starts a command on a host."""
        init = self._init(host)
        env = {
            "PATH": os.environ["PATH"], "HOME": str(self.own), "TMPDIR": str(self.own),
            "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8",
            "BEAMJAX_CACHE": str(_cache()),
        }  # fmt: skip
        enter = ["nsenter", "-t", str(init), "-n", "-m", "-u", "-p", "--", *command]
        with open(self.folder / "logs" / log, "ab") as errors:
            return subprocess.Popen(
                enter, stdin=subprocess.DEVNULL, stderr=errors, env=env, cwd=ROOT,
                **{"stdout": errors, **options},
            )  # fmt: skip

    def _init(self, host: str) -> int:
        """The pid of the first process of a host: `unshare` has forked it."""
        pid = self._inits[host].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0])

    def start(self, service: str, host: str) -> None:
        """Starts jm, jobserver, tm or pool on a host."""
        command = getattr(self, f"_{service}")(host)
        self._services[f"{service} {host}"] = self.on(host, command, f"{service}-{host}.log")

    def kill(self, service: str, host: str) -> None:
        """Kills a service, with the processes below it."""
        process = self._services.pop(f"{service} {host}")
        for pid in [*reversed(_below(process.pid)), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()

    def kill_pool(self, host: str) -> None:
        """Kills the process that computes; its supervisor starts another one."""
        for pid in _below(self._services[f"pool {host}"].pid):
            if "--supervisor" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, 9)

    def link(self, host: str, state: str) -> None:
        """Sets the network of a host up or down."""
        _do("ip", "-n", f"{PREFIX}-net", "link", "set", f"v-{host}", state)

    def read_only(self, host: str, flag: str) -> None:
        """Makes the shared folder read-only (ro) or writable (rw) on a host."""
        mount = ["mount", "-o", f"remount,{flag},bind", str(self.shared)]
        self.on(host, mount, "mount.log").wait()

    def fill(self, host: str) -> None:
        """Fills the temporary folder of a host."""
        self.on(host, ["dd", "if=/dev/zero", f"of={self.own}/full", "bs=1M"], "fill.log").wait()

    def free(self, host: str) -> None:
        """Frees the temporary folder of a host."""
        self.on(host, ["rm", "-f", f"{self.own}/full"], "fill.log").wait()

    def ask(self, path: str) -> Any:
        """Asks the REST API of Flink."""
        script = (
            "import sys, urllib.request as u; "
            f"print(u.urlopen('http://hosta:8081/{path}', timeout=5).read().decode())"
        )
        asked = self.on("d", [sys.executable, "-c", script], "ask.log", stdout=subprocess.PIPE)
        return json.loads(asked.communicate()[0] or "null")

    # --- the commands of services, as docs/flink.md has them

    def _jm(self, host: str) -> list[str]:
        entry = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
        return self._java([], entry, f"--configDir={self._configuration(host)}")

    def _tm(self, host: str) -> list[str]:
        entry = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
        return self._java([], entry, f"--configDir={self._configuration(host)}")

    def _pool(self, host: str) -> list[str]:
        return [sys.executable, "-m", "beamjax.pipelines.clusters.worker_pool", "--port", "50001"]

    def _jobserver(self, host: str) -> list[str]:
        from beamjax.pipelines.clusters import jars

        front = jars.own_classes(_jars(), "ClasspathScanningResourcesDetector")
        return self._java(
            [front], "org.apache.beam.runners.flink.FlinkJobServerDriver",
            "--job-host=hosta", "--job-port=8099", "--artifact-port=8098", "--expansion-port=-1",
            f"--artifacts-dir={self.own}/artifacts", "--flink-master=hosta:8081",
            f"--flink-conf-dir={self._configuration(host)}",
        )  # fmt: skip

    def _java(self, front: list[Path], *arguments: str) -> list[str]:
        from beamjax.pipelines.clusters import jars

        return jars.java(512, [*front, _jars()], *arguments)

    def _configuration(self, host: str) -> Path:
        text = (
            (ROOT / "docker/flink/flink-conf.yaml").read_text().replace(": jobmanager", ": hosta")
        )
        if host in "bc":
            text += f"taskmanager.host: host{host}\n"
        folder = self.folder / f"configuration-{host}"
        folder.mkdir(exist_ok=True)
        (folder / "flink-conf.yaml").write_text(text)
        return folder


def _cache() -> Path:
    from beamjax.storage.trust import cache_folder

    return Path(cache_folder("x")).parent


def _jars() -> Path:
    from beamjax.pipelines.clusters import jars

    return jars.classpath("flink")


def _do(*command: str) -> None:
    subprocess.run(command, check=True)


def _below(pid: int) -> list[int]:
    """The processes below another one, as this machine sees them."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_below(int(child))]
    return found


def _wait(condition: Callable[[], Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


# --- scenarios

OPTIONS = {
    "job_endpoint": "hosta:8099", "flink_master": "hosta:8081", "environment_type": "EXTERNAL",
    "environment_config": "localhost:50001", "parallelism": 2,
}  # fmt: skip

Event = Callable[[Hosts], None]


@dataclass(frozen=True)
class Scenario:
    """A run, and what happens to the hosts meanwhile."""

    name: str  # for the table
    kind: str  # see `hosts_job.run`, as for `count`
    count: int
    events: tuple[tuple[float, Event], ...] = ()  # at these seconds after its first job runs
    options: dict[str, Any] = field(default_factory=dict)  # replace `OPTIONS`; None removes one
    error: str = ""  # part of the message with which it ends, or of a warning; "" if of none
    before: Event | None = None  # happens before the run
    after: Event | None = None  # happens after it, when nothing may be left
    kills: float | None = None  # at which second the launcher is killed, and the call repeated


def pools(hosts: Hosts) -> None:
    """Kills the processes of both pools."""
    hosts.kill_pool("b")
    hosts.kill_pool("c")


def no_pools(hosts: Hosts) -> None:
    """Ends both pools."""
    hosts.kill("pool", "b")
    hosts.kill("pool", "c")


def both_pools(hosts: Hosts) -> None:
    """Starts both pools again."""
    hosts.start("pool", "b")
    hosts.start("pool", "c")


def down(host: str) -> Event:
    return lambda hosts: hosts.link(host, "down")


def up(host: str) -> Event:
    return lambda hosts: hosts.link(host, "up")


def read_only(hosts: Hosts) -> None:
    hosts.read_only("d", "ro")


def writable(hosts: Hosts) -> None:
    hosts.read_only("d", "rw")


def restarted(service: str, host: str) -> Event:
    def event(hosts: Hosts) -> None:
        hosts.kill(service, host)
        hosts.start(service, host)

    return event


def killed(service: str, host: str) -> Event:
    return lambda hosts: hosts.kill(service, host)


def again(service: str, host: str) -> Event:
    return lambda hosts: hosts.start(service, host)


def scenarios() -> list[Scenario]:
    """The scenarios of the table."""
    master = {"job_endpoint": None, "environment_type": None, "environment_config": None}
    found = [
        Scenario("a pass", "pass", 20),
        Scenario("100 rounds", "rounds", 100),
        Scenario("1100 rounds", "rounds", 1100),
        Scenario("a session of 50 calls", "session", 50),
        Scenario("a pass over a file of NumPy", "npy", 20),
        Scenario("a pass over Parquet", "parquet", 20),
        Scenario("flink_master without a job server", "rounds", 100, options=master),
        Scenario("no work_folder", "rounds", 100, options={"work_folder": None},
                 error="work_folder"),
        Scenario("one pool is down at the start", "rounds", 100, before=killed("pool", "c"),
                 after=again("pool", "c"),
                 error="can't reach its pool of workers at localhost:50001"),
        Scenario("both pools are down at the start", "rounds", 100, before=no_pools,
                 after=both_pools, error="can't reach its pool of workers at localhost:50001"),
        Scenario("both pools killed in rounds", "rounds", 3000, ((5, pools),)),
        Scenario("launcher killed, called again", "rounds", 3000, kills=5,
                 options={"checkpoint": "checkpoint", "checkpoint_every": 100}),
        Scenario("launching host dies in a pass, called again", "pass", 500, kills=10),
        Scenario("cancel() without flink_master", "cancel", 250, options={"flink_master": None}),
        Scenario("pipeline_timeout", "pass", 250, options={"pipeline_timeout": 8},
                 error="pipeline_timeout"),
        Scenario("cancel()", "cancel", 250),
        Scenario("shared folder read-only for 10 s", "rounds", 3000,
                 ((5, read_only), (15, writable))),
        Scenario("job manager killed in a pass", "pass", 150, ((5, killed("jm", "a")),),
                 after=manager, error="job manager"),
        Scenario("job manager restarted in a pass", "pass", 150, ((5, restarted("jm", "a")),),
                 after=settled, error="job manager has forgotten the job"),
        Scenario("job server killed in rounds", "rounds", 3000, ((5, killed("jobserver", "a")),),
                 after=again("jobserver", "a")),
        Scenario("job server killed in a pass", "pass", 150, ((5, killed("jobserver", "a")),),
                 after=again("jobserver", "a")),
    ]  # fmt: skip
    for seconds in (5, 30, 120):
        events = ((5, down("c")), (5 + seconds, up("c")))
        for kind, count, where in (("rounds", 3000, "rounds"), ("pass", 100, "a pass")):
            name = f"link down {seconds} s in {where}"
            found.append(Scenario(name, kind, count, events, after=settled))
    return found


def manager(hosts: Hosts) -> None:
    """Starts the job manager again."""
    hosts.start("jm", "a")
    settled(hosts)


def settled(hosts: Hosts) -> None:
    """Waits until the task managers have registered again."""
    _wait(lambda: (hosts.ask("overview") or {}).get("slots-total") == 2, 90)


def faults(rng: random.Random) -> dict[str, tuple[tuple[float, Event], ...]]:
    """One fault of each kind at a random moment, by its name."""
    at, host, seconds = rng.uniform(0, 15), rng.choice("bc"), rng.choice([5, 30, 120])
    full = rng.choice("bcd")
    return {
        f"link of {host} down {seconds} s": ((at, down(host)), (at + seconds, up(host))),
        f"pool of {host}": ((at, lambda hosts: hosts.kill_pool(host)),),
        "both pools": ((at, pools),),
        f"task manager of {host}": ((at, restarted("tm", host)),),
        "job manager": ((at, restarted("jm", "a")),),
        "job server": ((at, restarted("jobserver", "a")),),
        "read-only": ((at, read_only), (at + 10, writable)),
        f"temporary folder of {full} full": (
            (at, lambda hosts: hosts.fill(full)),
            (at + 20, lambda hosts: hosts.free(full)),
        ),
        "launcher": ((at, lambda hosts: None),),
    }


def drawn(rng: random.Random) -> Scenario:
    """A random scenario, one in four with two faults."""
    kind, count = rng.choice([("pass", 100), ("rounds", 3000), ("session", 1000)])
    possible = faults(rng)
    names = rng.sample(list(possible), 2 if rng.random() < 0.25 else 1)
    events = [event for name in names for event in possible[name]]
    kills = possible["launcher"][0][0] if "launcher" in names else None
    at = ", ".join(f"{name} at {possible[name][0][0]:.0f} s" for name in names)
    # The same call again must not wait for the slots of the one that was killed.
    saving = {"checkpoint": f"checkpoint-{rng.random()}", "checkpoint_every": 100}
    options = saving if kills is not None and kind == "rounds" else {}
    return Scenario(
        f"{at} in a {kind}", kind, count, tuple(events), options, "?", after=settled, kills=kills
    )


# --- runs


@dataclass
class Bench:
    """What all scenarios share."""

    hosts: Hosts
    bits: dict[tuple[str, int], str] = field(default_factory=dict)
    passed: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, scenario: Scenario) -> None:
        """Runs a scenario, and prints a line of the table."""
        hosts = self.hosts
        if scenario.before is not None:
            scenario.before(hosts)
        begun = time.monotonic()
        log = hosts.folder / "logs" / "launcher.log"
        before = log.stat().st_size if log.exists() else 0
        told = self._launched(scenario)
        took = time.monotonic() - begun
        told["log"] = log.read_bytes()[before:].decode(errors="replace")
        verdict = self._judge(scenario, told)
        if scenario.after is not None:
            scenario.after(hosts)
        clean = time.monotonic()
        _wait(lambda: not self._left(), SECONDS_TO_CLEAN)
        left = self._left()
        if left:
            verdict += f"; LEFT: {', '.join(left)}"
        seconds = f"{took:6.1f} s, clean after {time.monotonic() - clean:4.1f} s"
        print(f"{scenario.name:50} {seconds}  {verdict}", flush=True)
        if verdict == verdict.lower():
            self.passed += 1
        else:
            self.failures.append(scenario.name)

    def _launched(self, scenario: Scenario) -> dict[str, Any]:
        """Runs the launcher to its end, and lets happen what has to."""
        call = self._call(scenario)
        process = self.hosts.on("d", call, "launcher.log", stdout=subprocess.PIPE)
        if scenario.events or scenario.kills is not None:
            _wait(lambda: process.poll() is not None or self._jobs(), LIMIT)
        if scenario.kills is not None:
            time.sleep(scenario.kills)
            _kill_all(process)
            process = self.hosts.on("d", call, "launcher.log", stdout=subprocess.PIPE)
        timers = [threading.Timer(at, event, [self.hosts]) for at, event in scenario.events]
        for timer in timers:
            timer.start()
        try:
            lines = process.communicate(timeout=LIMIT)[0].splitlines()
            return dict(json.loads(lines[-1])) if len(lines) > 1 else {}
        except subprocess.TimeoutExpired:
            return {"hung": True}
        finally:
            _kill_all(process)
            for timer in timers:
                timer.join()

    def _call(self, scenario: Scenario) -> list[str]:
        folder = str(self.hosts.shared)
        options = {**OPTIONS, "work_folder": folder, **scenario.options}
        if options.get("checkpoint"):
            options["checkpoint"] = f"{folder}/{options['checkpoint']}"
        options = {name: value for name, value in options.items() if value is not None}
        what = [scenario.kind, str(scenario.count), "FlinkRunner", json.dumps(options)]
        what.append(f"{folder}/data")
        return [sys.executable, "-m", "benchmarks.hosts_job", *what]

    def _judge(self, scenario: Scenario, told: dict[str, Any]) -> str:
        """How a run ended; in capitals if it must not."""
        if told.get("hung"):
            return "HUNG"
        if "error" in told:
            text = " ".join(told["error"].split())[:160].lower()
            named = told["named"] and (scenario.error == "?" or scenario.error.lower() in text)
            named = named and scenario.error != ""
            return f"{'named error' if named else 'OTHER ERROR'}: {text}"
        if told.get("state"):
            return "cancelled" if told["state"] == "cancelled" else f"STATE {told['state']}"
        if "bits" not in told:
            return "NO RESULT"
        if told["bits"] != self._right(scenario):
            return "WRONG BITS"
        if scenario.error in ("", "?"):
            return "same bits"
        return "same bits, with a warning" if scenario.error in told["log"] else "NO ERROR"

    def _right(self, scenario: Scenario) -> str:
        """The bits with `runner="local"`."""
        key = scenario.kind, scenario.count
        if key not in self.bits:
            what = [scenario.kind, str(scenario.count), "local", "{}", f"{self.hosts.shared}/data"]
            command = [sys.executable, "-m", "benchmarks.hosts_job", *what]
            asked = self.hosts.on("d", command, "local.log", stdout=subprocess.PIPE)
            self.bits[key] = json.loads(asked.communicate()[0].splitlines()[-1])["bits"]
        return self.bits[key]

    def _left(self) -> list[str]:
        """What is left of runs."""
        files = [
            path.name
            for path in self.hosts.shared.iterdir()
            if not path.name.startswith(("checkpoint", "data"))
        ]
        return files + [f"job {job}" for job in self._jobs()]

    def _jobs(self) -> list[str]:
        """The ids of the jobs of Flink that run."""
        jobs = (self.hosts.ask("jobs/overview") or {}).get("jobs", [])
        ended = ("FINISHED", "FAILED", "CANCELED")
        return [job["jid"] for job in jobs if job["state"] not in ended]


def _kill_all(process: Process) -> None:
    for pid in [process.pid, *_below(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    process.wait()


def kept_logs(hosts: Hosts) -> str:
    """Copies the logs of all hosts, and says where they are."""
    kept = shutil.copytree(hosts.folder / "logs", tempfile.mkdtemp(), dirs_exist_ok=True)
    return f"logs are in {kept}"


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Hosts]:
    """A context with four hosts and a cluster on them."""
    hosts = Hosts(folder)
    try:
        hosts.up()
        hosts.start("jm", "a")
        for host in "bc":
            hosts.start("pool", host)
            hosts.start("tm", host)
        hosts.start("jobserver", "a")
        if not _wait(lambda: (hosts.ask("overview") or {}).get("slots-total") == 2, 300):
            sys.exit(f"the cluster does not start; {kept_logs(hosts)}")
        yield hosts
    finally:
        hosts.down()


def namespaces() -> str | None:
    """Why hosts can't be made here; None if they can."""
    lacks = [
        tool for tool in ("ip", "nsenter", "unshare", "java", "javac") if not shutil.which(tool)
    ]
    if lacks:
        return f"there is no {', '.join(lacks)}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return tried.stderr.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="names of scenarios, or parts of them")
    parser.add_argument("--random", type=int, default=20, help="number of random scenarios")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if (reason := namespaces()) is not None:
        print(f"hosts can't be made here: {reason}")
        return
    # So that the hosts are removed then as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rng = random.Random(flags.seed)
    chosen = [
        scenario
        for scenario in scenarios()
        if flags.only is None or any(name in scenario.name for name in flags.only)
    ]
    with tempfile.TemporaryDirectory(prefix="beamjax-hosts-") as name, started(Path(name)) as hosts:
        bench = Bench(hosts)
        for scenario in (*chosen, *(drawn(rng) for _ in range(flags.random))):
            bench.run(scenario)
        print(f"{bench.passed} passed")
        if bench.failures:
            print(f"failed: {', '.join(bench.failures)}")
            print(kept_logs(hosts))
    sys.exit(bool(bench.failures))


if __name__ == "__main__":
    main()
