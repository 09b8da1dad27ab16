"""Heartbeats: files that a process rewrites, so that processes on other hosts see that it lives.

Readers compare the content with what they saw before. They use no clock of another host, and no
pid: hosts may have the same name, and containers of one host have pids of their own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

from beamjax.storage import files
from beamjax.storage.schema import parse_json
from beamjax.telemetry import process_ids

BEAT_SECONDS, REMOTE_BEAT_SECONDS = 2.0, 4.0
"""Seconds between two heartbeats in a local folder, and at a URL, where each costs a request."""

MAX_GAP_SECONDS = 5.0
"""Largest part of the time between two looks that counts as silence. A process that did not look,
because it was stopped or busy, does not know whether there were heartbeats."""

_log = logging.getLogger("beamjax")


def seconds_at(path: str) -> float:
    """Seconds between two heartbeats at a path or URL."""
    return REMOTE_BEAT_SECONDS if files.is_url(path) else BEAT_SECONDS


class Heart:
    """Writes heartbeats of this process to a file until it is stopped; nothing else writes it."""

    def __init__(self, path: str):
        self.path = path
        self._beats = 0
        self._stopped = threading.Event()
        # Here, and not in the thread: a folder that can't be written is an error of the caller.
        self._beat()
        threading.Thread(target=self._keep_beating, name="beamjax heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Ends the heartbeats. The file stays."""
        self._stopped.set()

    def _keep_beating(self) -> None:
        while not self._stopped.wait(seconds_at(self.path)):
            try:
                self._beat()
            except Exception as error:  # whatever a file system raises
                # Readers miss a heartbeat, but not the next ones.
                _log.warning("can't write the heartbeat %s: %s", self.path, error)

    def _beat(self) -> None:
        self._beats += 1
        record = {"beats": self._beats, "process": process_ids.this_process()}
        files.write(self.path, json.dumps(record).encode(), make=False)


class Pulse:
    """Whether another process lives, from the heartbeats in its file."""

    def __init__(self, data: bytes):
        record = parse_json(data, "a heartbeat")
        if not isinstance(record, dict) or not isinstance(record.get("process"), dict):
            raise ValueError(f"found {data!r:.80}, expected a heartbeat")
        self.process: dict[str, Any] = record["process"]
        self._seen: object = data
        self._looked = time.monotonic()
        self._silence = 0.0

    @property
    def needs_looks(self) -> bool:
        """Whether only heartbeats tell, as this process does not see the pids of the other one."""
        return process_ids.is_alive(self.process) is None

    def look(self, seen: object) -> None:
        """Records what the file is now: its content, or whatever changes with it."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._silence = seen, 0.0
        else:
            self._silence += min(now - self._looked, MAX_GAP_SECONDS)
        self._looked = now

    def is_dead(self, seconds: float) -> bool:
        """Whether the process has ended, or was silent for so long while this one looked."""
        alive = process_ids.is_alive(self.process)
        return self._silence > seconds if alive is None else not alive
