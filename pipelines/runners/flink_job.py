"""The job of a pipeline on Flink, by the REST API of its cluster."""

from __future__ import annotations

import logging
import re
import secrets
import time
import urllib.error

from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
)

from beamjax.errors import WorkerError
from beamjax.pipelines.clusters import guard, job_servers
from beamjax.pipelines.clusters.flink_rest import NO_ANSWER
from beamjax.pipelines.clusters.flink_server import rest_of
from beamjax.pipelines.runners.spec import Look, RunningJob

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_GO = 10.0
"""Seconds in which a cancelled job has to be gone."""
_SECONDS_BEFORE, _SECONDS_BETWEEN_REASONS = 8.0, 4.0
"""Seconds before Flink is first asked why a job does not get on, and between two such questions."""
_SECONDS_OF_SILENCE = 15.0
"""Seconds in which a job manager that ended may be back."""
_LOG = logging.getLogger("beamjax")


def rename(flags: PipelineOptions) -> None:
    """Gives the job of a pipeline a name of its own, by which Flink knows it."""
    # A run that starts its job again cancels the one before, and must not cancel the new one.
    named = flags.view_as(GoogleCloudOptions)
    if rest_of(flags) is not None and (named.job_name or "").startswith(guard.PREFIX):
        named.job_name = f"{named.job_name}-{secrets.token_hex(4)}"


class FlinkJob(RunningJob):
    """The job of a pipeline, which Flink knows by its name."""

    def __init__(self, flags: PipelineOptions):
        self._rest = rest_of(flags)  # None if the options don't name the cluster
        self._name = flags.view_as(GoogleCloudOptions).job_name or ""
        portable = flags.view_as(PortableOptions)
        self._pool = portable.environment_config or ""
        self._endpoint = portable.job_endpoint

    def look(self, attempts: int = 3) -> Look:
        asks_next = answered = time.monotonic() + _SECONDS_BEFORE

        def look() -> WorkerError | None:
            """The error of a pool or a job manager out of reach, or of missing slots."""
            nonlocal asks_next, answered
            now = time.monotonic()
            if self._rest is None or not self._name or now < asks_next:
                return None
            asks_next = now + _SECONDS_BETWEEN_REASONS
            try:
                reason = reason_of(self._rest.failures(self._name), self._pool, attempts)
            except NO_ANSWER:
                # The job manager is restarted, or the job has just ended.
                return self.gone() if now - answered > _SECONDS_OF_SILENCE else None
            answered = now
            return None if reason is None else WorkerError(reason)

        return look

    def goes_on(self) -> bool:
        try:
            return bool(self._rest is not None and self._name and self._rest.running(self._name))
        except NO_ANSWER:
            return False

    def wait(self) -> None:
        assert self._rest is not None
        try:
            while self._rest.running(self._name):
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            state, reason = self._rest.end(self._name)
        except NO_ANSWER as error:
            where = self._rest.address
            raise RuntimeError(f"Flink at {where} does not answer: {error}") from error
        if state != "FINISHED":
            raise RuntimeError(f"the job {self._name} of Flink ended as {state}: {reason}")

    def gone(self) -> WorkerError | None:
        if self._rest is None:
            return None
        try:
            self._rest.ask("config")
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            return WorkerError(
                f"flink_master: the job manager at {self._rest.address} does not answer any more "
                f"({reason}); start it again, and run again"
            )
        return None

    def cancel(self) -> None:
        # The cancellation of Beam's job servers may leave jobs running, with all their slots.
        rest, name, endpoint = self._rest, self._name, self._endpoint
        if rest is None or not name:
            if endpoint and not job_servers.is_own(endpoint):
                _LOG.warning(
                    "the job %s was cancelled at %s, whose Flink may go on until its workers "
                    "notice; with the option flink_master, its end is checked", name, endpoint,
                )  # fmt: skip
            return
        end = time.monotonic() + _SECONDS_TO_GO
        try:
            # At first there may be none: a job server goes on to submit a job after a cancellation.
            while (left := rest.cancel(jobs := rest.named(name))) or not jobs:
                if time.monotonic() > end:
                    break
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except NO_ANSWER as error:
            _LOG.warning("can't cancel the job %s at %s: %s", name, rest.address, error)
            return
        for job in left:
            _LOG.warning(
                "the job %s at %s still runs; cancel it in Flink's dashboard",
                job["jid"], rest.address,
            )  # fmt: skip


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
