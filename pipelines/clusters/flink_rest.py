"""Asks a Flink cluster by its REST API: what it is, what runs on it, and why a job fails."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from beamjax.errors import OptionsError

ENDED = ("FINISHED", "FAILED", "CANCELED")
_SECONDS_TO_ANSWER = 5.0
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class FlinkRest:
    """The REST API of a cluster."""

    address: str  # a URL without a path

    def ask(self, path: str, method: str = "GET") -> Any:
        """The answer to a request; OSError if there is none, ValueError if it is no JSON."""
        # Not by a proxy: a cluster is in the same network.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"{self.address}/{path}", method=method)
        try:
            with direct.open(request, timeout=_SECONDS_TO_ANSWER) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()
            raise OSError(f"{path}: {error}") from None

    def configuration(self) -> dict[str, str]:
        """The configuration of the job manager."""
        return {entry["key"]: entry["value"] for entry in self.ask("jobmanager/config")}

    def named(self, name: str | None) -> list[dict[str, Any]]:
        """The jobs of a name, also those that have ended; all jobs for None."""
        return [j for j in self.ask("jobs/overview")["jobs"] if name in (None, j["name"])]

    def running(self, name: str | None = None) -> list[dict[str, Any]]:
        """The jobs that have not ended: all, or those of a name."""
        return [job for job in self.named(name) if job["state"] not in ENDED]

    def cancel(self, name: str, seconds: float) -> list[str]:
        """Cancels all jobs of a name, and waits; returns the ids of those that have not ended."""
        end = time.monotonic() + seconds
        while True:
            # None yet is no reason to stop: a job server may submit the job after a cancellation.
            jobs = self.named(name)
            left = [job for job in jobs if job["state"] not in ENDED]
            for job in left:
                if job["state"] != "CANCELLING":
                    self.ask(f"jobs/{job['jid']}?mode=cancel", "PATCH")
            if (jobs and not left) or time.monotonic() > end:
                return [job["jid"] for job in left]
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def end(self, name: str) -> tuple[str, str]:
        """The state in which the last job of a name ended, and the reason if it failed."""
        last = max(self.named(name), key=lambda job: job["start-time"])
        if last["state"] == "FINISHED":
            return "FINISHED", ""
        history = self.ask(f"jobs/{last['jid']}/exceptions")
        return last["state"], str(history.get("root-exception"))

    def failures(self, name: str) -> list[tuple[int, str]]:
        """When the tasks of the running jobs of a name failed, and the stack traces."""
        found = []
        for job in self.running(name):
            history = self.ask(f"jobs/{job['jid']}/exceptions")
            entries = history.get("exceptionHistory", {}).get("entries", [])
            found += [(int(entry["timestamp"]), str(entry["stacktrace"])) for entry in entries]
        return found


def check(
    rest: FlinkRest, version: str | None, parallelism: int | None, owns_strategy: bool
) -> list[str]:
    """Raises OptionsError if pipelines can't run on a cluster; returns doubts for the log."""
    # `version` is what the job server needs, such as "1.16", None for a job server of others;
    # `owns_strategy` says that the job server sets a restart strategy of its own.
    where = f"flink_master: {rest.address}"
    try:
        found = rest.ask("config")["flink-version"]
        overview, settings = rest.ask("overview"), rest.configuration()
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise OptionsError(
            f"{where} does not answer as Flink ({reason}); expected the host and port of the REST "
            "API of a job manager (rest.address and rest.port in its configuration)"
        ) from error
    if version is not None and not found.startswith(f"{version}."):
        raise OptionsError(
            f"{where} is Flink {found}, but the job server that beamjax starts is for Flink "
            f"{version}; add flink_version={found.rpartition('.')[0]!r}, with which Beam fetches "
            "its own job server, or name one with job_endpoint"
        )
    order = settings.get("classloader.resolve-order", "child-first")
    if version is not None and order != "parent-first":
        raise OptionsError(
            f"{where} has classloader.resolve-order {order}, expected parent-first: Beam's jars "
            "are in Flink's lib, not sent with each pipeline"
        )
    slots, free = overview["slots-total"], overview["slots-available"]
    wanted = parallelism or 1
    if slots < wanted:
        raise OptionsError(
            f"{where} has {slots} slots on {overview['taskmanagers']} task managers, expected at "
            f"least {wanted} (option parallelism)"
        )
    doubts = []
    if free < wanted:
        names = ", ".join(f"{job['name']} ({job['jid']})" for job in rest.running())
        doubts.append(
            f"{where} has {free} free slots of {slots}, and this run needs {wanted}: it waits for "
            f"{names}"
        )
    strategy = settings.get("restart-strategy", settings.get("restart-strategy.type", "none"))
    if not owns_strategy and strategy in ("none", "off", "disable"):
        doubts.append(
            f"{where} has no restart-strategy, so one worker that dies ends the pipeline; set "
            "fixed-delay in the configuration of the job server or the job manager"
        )
    return doubts


_REFUSED = re.compile(
    r"(?:Connection refused|UnknownHostException)[^\n]*?([\w.-]+(?:/[\d.]+)?:\d+)"
)
_NO_SLOTS = "NoResourceAvailableException"


def reason_of(failures: list[tuple[int, str]], pool: str, attempts: int) -> str | None:
    """Why a job does not get on, if its failures show it; None if they don't."""
    refusals = {}
    for moment, text in failures:
        refused = _REFUSED.search(text)
        # By the port alone: each task manager writes the name of the host in its own way.
        if refused and refused[1].rpartition(":")[2] == pool.rpartition(":")[2]:
            refusals[moment] = refused[0]
        if _NO_SLOTS in text:
            return "Flink has no slots for it: other jobs have them, or task managers are gone"
    if len(refusals) < attempts:  # the pool may just be restarted
        return None
    return (
        f"a task manager can't reach its pool of workers at {pool} ({refusals[max(refusals)]}); "
        "start one on its host with `python -m beamjax.pipelines.clusters.worker_pool`, with the "
        "host and port of environment_config"
    )
