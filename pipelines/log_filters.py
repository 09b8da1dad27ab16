"""What Beam logs that is no fault of a run: its optional packages, and jobs that were cancelled."""

from __future__ import annotations

import logging

from beamjax.errors import JobCancelledError

_MISSING_PACKAGES = "apitools not found"
_CANCELLED = f"{JobCancelledError.__module__}.{JobCancelledError.__name__}: "
_REPORT_ERRORS = (
    "apache_beam.runners.common",
    "apache_beam.runners.worker.sdk_worker",
    "apache_beam.runners.portability.local_job_service",
)
"""Loggers to which Beam reports the errors of a DoFn, from threads and from worker processes."""


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_MISSING_PACKAGES)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, JobCancelledError) and _CANCELLED not in record.getMessage()


def install() -> None:
    """Has this process leave such records out; all others stay, on all levels."""
    # Importing Beam without the packages for Google Cloud warns of it, on the root logger.
    logging.getLogger().addFilter(_is_of_use)
    for name in _REPORT_ERRORS:
        logging.getLogger(name).addFilter(_is_no_cancellation)
