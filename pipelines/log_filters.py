"""Filters log messages of Beam that report no fault: missing packages, and cancelled jobs."""

from __future__ import annotations

import logging
from typing import Any

from beamjax._beam_compat import ERROR_LOGGERS, MISSING_PACKAGES, print_errors_with
from beamjax.errors import JobCancelledError

_CANCELLED = f"{JobCancelledError.__module__}.{JobCancelledError.__name__}: "


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(MISSING_PACKAGES)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, JobCancelledError) and _CANCELLED not in record.getMessage()


def install() -> None:
    """Installs the filters in this process. They drop no other records, whatever their level."""
    # Beam logs a warning to the root logger if the packages for Google Cloud are missing.
    logging.getLogger().addFilter(_is_of_use)
    for name in ERROR_LOGGERS:
        logging.getLogger(name).addFilter(_is_no_cancellation)


def install_in_worker() -> None:
    """Filters what workers of this process print, as they print errors besides logging them."""

    def show(text: str, file: Any) -> None:
        if _CANCELLED not in text:
            print(text, file=file)

    print_errors_with(show)
