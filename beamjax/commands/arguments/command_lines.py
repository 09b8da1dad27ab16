"""The command line that started a job, as data in its folder, to run it again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from beamjax.storage import records
from beamjax.telemetry.job_folder import JobFolder

NAME = "command"


def keep_command(folder: str, argv: Sequence[str]) -> None:
    """Writes the words after `beamjax`, and the current folder, to which their paths are relative.

    Raises:
      SourceError: the folder can't be written.
    """
    JobFolder(folder).write(NAME, {"argv": list(argv), "cwd": os.getcwd()})


def read_command(folder: JobFolder) -> tuple[list[str], str] | None:
    """Undoes `keep_command`; None for a job that was not started by a command line.

    Raises:
      ArrayFormatError: the file is not what was written.
    """
    found = folder.read(NAME)
    if found is None:
        return None
    path = f"{folder.path}/{NAME}{records.SUFFIX}"
    fields: dict[str, Any] = records.checked(found, {"argv": list, "cwd": str}, path)
    return [str(word) for word in fields["argv"]], fields["cwd"]
