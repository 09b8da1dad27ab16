"""The errors that beamjax raises; all of them derive from `BeamjaxError`.

Each message says where the error is (the user's file and line, or the step, shard or member), what
was found, what was expected and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """A failure on a worker.

    Attributes:
      step: the name of the step of the plan; "" if it is unknown.
      shard: the number of the shard; None if the worker was not working on a shard.
      members: the first and the last member of the shard, or None.
      worker: the host and process id of the worker; "" for a failure in this process.
      traceback: the traceback of the worker as text; "" for a failure in this process.
      time: the time of the failure, in seconds since the epoch; 0 if it is unknown.
      others: the number of further failures of the same pipeline, including those of retries.
    """

    step: str = ""
    shard: int | None = None
    members: tuple[int, int] | None = None
    worker: str = ""
    traceback: str = ""
    time: float = 0.0
    others: int = 0


class BeamjaxError(Exception):
    """Base class of all errors raised by beamjax.

    Attributes:
      failure: the failure of a body as data: step, shard, members and traceback; None for other
        errors.
      run: the call that `beamjax.replay` repeats; None outside the process that called `run`.
      rounds: the number of complete rounds of loops before the error.
      replay_hint: the end of the message, which shows how to call `replay`; "" if the error can't
        be replayed.
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
    """A placement is unknown or ambiguous, or a value does not have its number of members."""


class StructureError(BeamjaxError, TypeError):
    """A tree, a leaf or a dtype is not one that the function accepts."""


class StagingError(BeamjaxError, ValueError):
    """A function can't be turned into a plan; the message names the line and a remedy."""


class ArrayFormatError(BeamjaxError, ValueError):
    """Bytes do not hold the array, accumulator, plan or record that was expected."""


class SourceError(BeamjaxError, ValueError):
    """A source can't be read or does not hold the expected data, or a file can't be written."""


class WorkerError(BeamjaxError, RuntimeError):
    """A body failed on a worker; the message names the step and the shard.

    The attribute `failure` holds these as data, with the traceback of the worker.
    """


class JobError(BeamjaxError, RuntimeError):
    """A job has no result because its launching process died, or a folder holds no such job."""


class JobCancelledError(JobError):
    """A job was cancelled before it was done."""


class OptionsError(BeamjaxError, ValueError):
    """An option, a runner or an argument is unknown or has an impossible value."""


class VerificationError(BeamjaxError, AssertionError):
    """The result on a runner differs from the result of `jax.jit` by more than the tolerance.

    Attributes:
      report: the `VerificationReport`; None if the trees, shapes or dtypes differ.
    """

    report: Any = None


class CheckpointError(BeamjaxError, ValueError):
    """A folder of checkpoints is in use, can't be read, or belongs to another run."""
