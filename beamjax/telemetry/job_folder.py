"""The folder of a job: its process, its progress, its state and its result.

Files are written atomically, with checksums that readers verify. The folder may be at a local path
or any URL that fsspec knows.
"""

# job.record        the program, the runner, the launching process
# command.record    the command line, if one started the job
# state.record      running, done, failed or cancelled, and the error
# progress.record   written about every second while the job runs
# about.record      the plan, the options and the machine, for reports
# course.record     samples of the progress and events over time, for reports
# dropped.arrays    the members that were dropped so far
# cancel.record     asks the job to end, if it exists
# records/          what each worker has done in the current pipeline
# result.record     structure and types of the result; it is written last
# result-0.arrays   ... and its leaves

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from beamjax._text import printable
from beamjax.errors import ArrayFormatError, JobError, OptionsError, SourceError
from beamjax.plan.dropping import Dropped, decode_file, encode_file, encode_lines
from beamjax.spans import Work
from beamjax.storage import files, records, temporary, trust
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.schema import from_plain, to_plain
from beamjax.telemetry import signs_of_life, worker_records
from beamjax.telemetry.progress import Progress

FORMAT = 1
"""Version of the layout of a folder."""
SILENCE_SECONDS = 60.0
"""Seconds without progress after which a launching process on another machine counts as lost."""
_DROPPED = "dropped.arrays"
_OWN = re.compile(
    r"(job|command|state|progress|about|course|cancel|result)\.record|(result-\d+|dropped)\.arrays"
)


@dataclass(frozen=True)
class JobRecord:
    """What is known of a job from its start."""

    name: str  # of the program
    runner: str
    process: Mapping[str, Any]  # the launching process, as `signs_of_life.this_process` says it
    time: float  # of the start, in seconds since the epoch
    format: int = FORMAT  # of the layout of the folder
    run: str = ""  # identifies this run among those that have used the folder

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"found format {self.format}, expected {FORMAT}")


@dataclass(frozen=True)
class _State:
    """The record of a state, with the record of an error if the job failed."""

    state: str
    error: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.state not in ("running", "done", "failed", "cancelled"):
            raise ValueError(f"found the state {self.state!r}, expected a state of a job")


class JobFolder:
    """The folder of one job, at a local path or a URL."""

    def __init__(self, path: str):
        self.path = path if files.is_url(path) else os.path.abspath(path)
        self.run = ""
        """Identifies the run of this process in the folder, once it has begun."""

    @property
    def slowness(self) -> float:
        """Factor on the time between reads of this folder, relative to a local one."""
        return worker_records.slowness(self.path)

    # --- records

    def read(self, name: str) -> dict[str, Any] | None:
        """A record, or None if there is none."""
        path = self.record_path(name)
        try:
            return records.decode(files.read(path), path)
        except ArrayFormatError:
            raise
        except Exception as error:  # file systems raise errors of many kinds
            if not self._has(name):
                return None
            raise SourceError(f"{path}: cannot read it ({error})") from error

    def write(self, name: str, record: dict[str, Any], *, make: bool = True) -> None:
        """Writes a record."""
        self._write(self.record_path(name), records.encode(record), make)

    def record_path(self, name: str) -> str:
        """The path of the file of a record."""
        return files.join(self.path, f"{name}{records.SUFFIX}")

    def _write(self, path: str, data: bytes, make: bool = True) -> None:
        try:
            files.write(path, data, make=make)
        except Exception as error:
            raise SourceError(
                f"{path}: cannot write a file of the job ({error}); expected a folder that this "
                "process and all workers can write and read"
            ) from error

    def _has(self, name: str) -> bool:
        return f"{name}{records.SUFFIX}" in files.names(self.path)

    # --- the job

    def begin(self, name: str, runner: str) -> None:
        """Makes the folder for a job that starts now in this process, without files of others."""
        trust.check_folder(self.path, "job_folder")
        try:
            files.make_folder(self.path)  # readable for this user only, unlike its parents
            files.make_folder(files.join(self.path, worker_records.FOLDER))
            self.clear()
        except OSError as error:
            raise SourceError(
                f"{self.path}: cannot be the folder of a job ({error}); expected a folder that "
                "this process and all workers can write and read"
            ) from error
        self.run = uuid.uuid4().hex
        record = JobRecord(name, runner, signs_of_life.this_process(), time.time(), run=self.run)
        self.write("job", to_plain(record))
        self.write_state("running")

    def refuse_other(self, overwrite: bool) -> None:
        """Raises OptionsError if a job in this folder still runs, or is done and not to replace."""
        with contextlib.suppress(ArrayFormatError, JobError):
            state = self.state()[0]
            if state == "done" and not overwrite:
                raise OptionsError(
                    f"job_folder: found a job that is done in {self.path}, expected a folder of "
                    "its own for each job; beamjax.open_job(folder).result() gives its result, and "
                    "the option overwrite=True replaces it"
                )
            if state == "running":
                process = self.describe().process
                raise OptionsError(
                    f"job_folder: found a job that still runs in {self.path}, of process "
                    f"{process.get('pid')} on {process.get('host')}, expected a folder of its own "
                    "for each job; cancel that job, or wait for it"
                )

    def describe(self) -> JobRecord:
        """The record that `begin` wrote."""
        values = self.read("job")
        if values is None:
            raise JobError(
                f"{self.path}: found no job; expected a folder that a run had as job_folder, or "
                "job.folder"
            )
        record = from_plain(JobRecord, values, self.record_path("job"))
        name, runner = printable(record.name), printable(record.runner)
        return replace(record, name=name, runner=runner)

    def state(self) -> tuple[str, dict[str, Any] | None]:
        """The state and the record of the error."""
        # "lost" without a launching process, "none" without a record.
        state = self._state()
        if state[0] != "running" or self._launcher_lives():
            return state
        # The process may have ended the job after its state was read.
        state = self._state()
        return ("lost", None) if state[0] == "running" else state

    def _state(self) -> tuple[str, dict[str, Any] | None]:
        record = self.read("state")
        if record is None:
            return "none", None
        state = from_plain(_State, record, self.record_path("state"))
        return state.state, None if state.error is None else dict(state.error)

    def _launcher_lives(self) -> bool:
        record = self.describe()
        alive = signs_of_life.is_alive(record.process)
        if alive is not None:
            return alive
        progress = self.read("progress") or {}
        return time.time() - float(progress.get("time", record.time)) < SILENCE_SECONDS

    def write_state(self, state: str, error: BaseException | None = None) -> None:
        """Writes the state of the job, and the error if it failed."""
        record = None if error is None else records.error_record(error)
        self.write("state", {"state": state, "error": record})

    # --- progress and cancellation

    def write_progress(self, progress: Progress) -> None:
        """Writes the progress of the job."""
        self.write("progress", {"time": time.time(), **progress.to_json()}, make=False)

    def progress(self) -> Progress:
        """The last recorded progress of the job; empty if there is none."""
        record = self.read("progress")
        path = self.record_path("progress")
        return Progress() if record is None else from_plain(Progress, record, path)

    def write_dropped(self, dropped: Sequence[Dropped]) -> None:
        """Writes the members that were dropped so far."""
        self._write(files.join(self.path, _DROPPED), encode_file(encode_lines(dropped)))

    def dropped(self) -> tuple[Dropped, ...]:
        """Undoes `write_dropped`."""
        path = files.join(self.path, _DROPPED)
        if _DROPPED not in files.names(self.path):
            return ()
        return tuple(decode_file(files.read(path), path))

    def request_cancel(self) -> None:
        """Requests the launching process and the workers to end the job."""
        self.write(worker_records.CANCEL, {"time": time.time()}, make=False)

    def cancel_requested(self) -> bool:
        """Whether a process has requested the end of the job."""
        return worker_records.cancel_requested(self.path)

    def workers(self, pipeline: str) -> dict[str, Work]:
        """The work in a pipeline by worker, from the oldest record; without unreadable records."""
        folder = files.join(self.path, worker_records.FOLDER)
        timed = {}
        for name in self._worker_files(pipeline):
            path = files.join(folder, name)
            worker = name.removeprefix(f"{pipeline}.").removesuffix(records.SUFFIX)
            with contextlib.suppress(Exception):
                record = records.decode(files.read(path), path)
                work = from_plain(Work, record["work"], path)
                timed[worker] = float(record["time"]), work
        ordered = sorted(timed.items(), key=lambda item: item[1][0])
        return {worker: work for worker, (_, work) in ordered}

    def forget_workers(self, pipeline: str) -> None:
        """Removes the records of a pipeline that is over."""
        with contextlib.suppress(Exception):
            folder = files.join(self.path, worker_records.FOLDER)
            files.remove_files(folder, self._worker_files(pipeline))

    def _worker_files(self, pipeline: str) -> list[str]:
        with contextlib.suppress(Exception):
            names = files.names(files.join(self.path, worker_records.FOLDER))
            return [name for name in names if name.startswith(f"{pipeline}.")]
        return []

    # --- the result

    def write_leaf(self, number: int, leaf: np.ndarray) -> None:
        """Writes a leaf of the result, with the run that wrote it."""
        self._write(self._leaf_path(number), encode_arrays([leaf], {"run": self.run}))

    def leaf(self, number: int, run: str) -> np.ndarray:
        """A leaf of the result of a run; ArrayFormatError if another run wrote it."""
        path = self._leaf_path(number)
        try:
            data = files.read(path)
        except Exception as error:
            raise SourceError(f"{path}: cannot read a leaf of the result ({error})") from error
        try:
            arrays, meta = decode_arrays(data)
        except ArrayFormatError as error:
            raise ArrayFormatError(f"{path}: {error}") from None
        if len(arrays) != 1 or meta.get("run", "") != run:
            raise ArrayFormatError(
                f"{path}: found {len(arrays)} arrays of run {meta.get('run', '')!r:.50}, expected "
                f"a leaf of run {run!r}; another run has written to this folder"
            )
        return arrays[0]

    def _leaf_path(self, number: int) -> str:
        return files.join(self.path, f"result-{number}.arrays")

    # --- the end

    def clear(self) -> None:
        """Removes the files of a job, but not the folder."""
        names = [name for name in files.names(self.path) if _OWN.fullmatch(name)]
        files.remove_files(self.path, names)
        folder = files.join(self.path, worker_records.FOLDER)
        files.remove_files(folder, [n for n in files.names(folder) if n.endswith(records.SUFFIX)])

    def remove(self) -> None:
        """Removes a temporary folder of a job, with all its files."""
        if not files.is_url(self.path):
            temporary.remove(self.path)
            return
        with contextlib.suppress(Exception):
            self.clear()
