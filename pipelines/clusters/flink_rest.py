"""Asks a Flink cluster by its REST API. As a program, cancels the pipelines of a dead launcher."""

# The program starts quickly and takes little memory, as it imports the standard library only.

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

ENDED = ("FINISHED", "FAILED", "CANCELED")
NO_ANSWER = (OSError, ValueError, KeyError, TypeError)
"""Errors of a request, and of an answer that Flink did not write."""
_SECONDS_TO_ANSWER = 5.0
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ARRIVE = 30.0
"""Seconds after the end of a launcher in which its last pipeline may still reach the cluster."""


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

    def named(self, name: str | None) -> list[dict[str, Any]]:
        """The jobs of a name, also those that have ended; all jobs for None."""
        return [j for j in self.ask("jobs/overview")["jobs"] if name in (None, j["name"])]

    def running(self, name: str | None = None) -> list[dict[str, Any]]:
        """The jobs that have not ended: all, or those of a name."""
        return [job for job in self.named(name) if job["state"] not in ENDED]

    def cancel(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Cancels jobs; returns those that had not ended."""
        left = [job for job in jobs if job["state"] not in ENDED]
        for job in left:
            if job["state"] != "CANCELLING":
                self.ask(f"jobs/{job['jid']}?mode=cancel", "PATCH")
        return left

    def end(self, name: str) -> tuple[str, str]:
        """The state in which the last job of a name ended, and the reason if it failed."""
        last = max(self.named(name), key=lambda job: job["start-time"])
        if last["state"] == "FINISHED":
            return "FINISHED", ""
        history = self.ask(f"jobs/{last['jid']}/exceptions")
        return last["state"], str(history.get("root-exception"))

    def failures(self, name: str) -> list[tuple[int, str]]:
        """When the tasks of the running jobs of a name failed, and the stack traces."""
        times_and_traces = []
        for job in self.running(name):
            history = self.ask(f"jobs/{job['jid']}/exceptions")
            entries = history.get("exceptionHistory", {}).get("entries", [])
            times_and_traces += [
                (int(entry["timestamp"]), str(entry["stacktrace"])) for entry in entries
            ]
        return times_and_traces


def cancel_after(launcher: int, rest: FlinkRest, name: str) -> None:
    """Waits until a launcher, the parent of this process, ends; then cancels its pipelines."""
    # A process whose parent ends gets another parent.
    while os.getppid() == launcher:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    end = time.monotonic() + _SECONDS_TO_ARRIVE
    while time.monotonic() < end:
        with contextlib.suppress(*NO_ANSWER):
            rest.cancel([job for job in rest.named(None) if job["name"].startswith(name)])
        time.sleep(_SECONDS_BETWEEN_LOOKS)


if __name__ == "__main__":
    cancel_after(int(sys.argv[1]), FlinkRest(sys.argv[2]), sys.argv[3])
