"""Every error that beamjax raises on purpose.

Each message says where (the user's file and line, step, shard or member), what was found, what was
expected and what to do. All of them derive from `BeamjaxError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """A failure on a worker.

    Attributes:
      step: name of the step of the plan, "" if it is unknown.
      shard: number of the shard, or None if it was no work on a shard.
      members: first and last member of the shard, or None.
      worker: host and process id, "" where the failure was in this process.
      traceback: as text, of the worker; "" where the failure was in this process.
      time: the time of the failure, in seconds since the epoch; 0 if it is unknown.
      others: further failures of the same pipeline, those of retries included.
    """

    step: str = ""
    shard: int | None = None
    members: tuple[int, int] | None = None
    worker: str = ""
    traceback: str = ""
    time: float = 0.0
    others: int = 0


class BeamjaxError(Exception):
    """Base of all errors raised by beamjax.

    Attributes:
      failure: the failure on a worker, or None if it was not on a worker.
      run: what `beamjax.replay` runs again, in the process that called `run`; otherwise None.
      rounds: the rounds of loops that were complete by then.
      replay_hint: how to replay it, which is the end of the message; "" if that is not possible.
    """

    failure: Failure | None = None
    run: Any = None
    rounds: int = 0
    replay_hint: str = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, [super().__str__(), self.replay_hint]))

    def __reduce__(self) -> Any:
        """Pickles the error without `run`, which holds the user's function and data."""
        here = ("run", "replay_hint")
        return type(self), self.args, {k: v for k, v in vars(self).items() if k not in here}


class OutsideProgramError(BeamjaxError, RuntimeError):
    """An operator was called outside a function decorated with `beamjax.program`."""


class PlacementError(BeamjaxError, ValueError):
    """A placement is unknown, ambiguous, or does not fit the value given for it."""


class StructureError(BeamjaxError, TypeError):
    """A tree, a leaf or a dtype is not what the operator accepts."""


class StagingError(BeamjaxError, ValueError):
    """A program cannot be turned into a plan as it stands."""


class ArrayFormatError(BeamjaxError, ValueError):
    """Bytes that should hold an array, an accumulator or a plan do not."""


class SourceError(BeamjaxError, ValueError):
    """A placed input cannot be read, or does not hold what it should."""


class WorkerError(BeamjaxError, RuntimeError):
    """A body failed on a worker; the message names the step and the shard.

    `failure` holds them as data, with the traceback of the worker.
    """


class JobError(BeamjaxError, RuntimeError):
    """A job has no result: it was lost with its launching process, or its folder holds no job."""


class JobCancelledError(JobError):
    """A job was cancelled before it was done."""


class OptionsError(BeamjaxError, ValueError):
    """An option is unknown or has an impossible value."""


class VerificationError(BeamjaxError, AssertionError):
    """The runner's answer differs from the in-process answer by more than the tolerance.

    Attributes:
      report: the `VerificationReport`, or None if the trees themselves differ.
    """

    report: Any = None


class CheckpointError(BeamjaxError, ValueError):
    """A folder of checkpoints is in use, can't be read, or belongs to another run."""
