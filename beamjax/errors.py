"""Every error that beamjax raises on purpose.

Each message says where (the user's file and line, step, shard or member), what was found, what was
expected and what to do. All of them derive from `BeamjaxError`.
"""

from __future__ import annotations


class BeamjaxError(Exception):
    """Base of all errors raised by beamjax."""


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
    """A body failed on a worker; the message names the step and the shard."""


class OptionsError(BeamjaxError, ValueError):
    """An option is unknown or has an impossible value."""


class VerificationError(BeamjaxError, AssertionError):
    """The runner's answer differs from the in-process answer by more than the tolerance."""


class CheckpointError(BeamjaxError, ValueError):
    """A folder of checkpoints is in use, can't be read, or belongs to another run."""
