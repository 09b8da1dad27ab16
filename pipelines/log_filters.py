"""Filters messages of Beam that report no fault.

These are missing packages, cancelled jobs, and connections that end with a pipeline.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from beamjax._beam_compat import (
    CONNECTION_LOGGERS,
    ERROR_LOGGERS,
    KILLED_WORKER,
    MISSING_PACKAGES,
    print_errors_with,
)
from beamjax.errors import JobCancelledError

_CANCELLED = f"{JobCancelledError.__module__}.{JobCancelledError.__name__}: "


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(MISSING_PACKAGES)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, JobCancelledError) and _CANCELLED not in record.getMessage()


def _is_no_connection(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_of_connection(record.exc_info[1]))


def _is_of_connection(error: BaseException | None) -> bool:
    """Whether an error says no more than that the other end of a connection has gone."""
    # Beam closes connections while its threads read from them. If a worker or a runner has died,
    # the error of the run says so.
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return "RpcError" in kinds or KILLED_WORKER in str(error)


_show = threading.excepthook


def _show_faults_of_threads(failed: threading.ExceptHookArgs) -> None:
    trace, by_beam = failed.exc_traceback, False
    while trace is not None:
        by_beam = by_beam or "apache_beam" in trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    if not (by_beam and _is_of_connection(failed.exc_value)):
        _show(failed)


def install() -> None:
    """Installs the filters in this process. They drop no other records, whatever their level."""
    # Beam logs a warning to the root logger if the packages for Google Cloud are missing.
    logging.getLogger().addFilter(_is_of_use)
    for name in ERROR_LOGGERS:
        logging.getLogger(name).addFilter(_is_no_cancellation)
    for name in CONNECTION_LOGGERS:
        logging.getLogger(name).addFilter(_is_no_connection)
    threading.excepthook = _show_faults_of_threads


def install_in_worker() -> None:
    """Filters what workers of this process print, as they print errors besides logging them."""

    def show(text: str, file: Any) -> None:
        if _CANCELLED not in text:
            print(text, file=file)

    print_errors_with(show)
