"""Columns in the names of folders, as Hive writes them: `year=2024/country=DE/part-0.parquet`."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from beamjax.errors import SourceError

_MISSING = "__HIVE_DEFAULT_PARTITION__"

Values = Mapping[str, str | None]
"""The value of each column in the folders of a file, as text; None for a missing one."""


def folder_values(folders: str) -> Values:
    """The columns in a path of folders, and their values."""
    pairs = (folder.partition("=") for folder in folders.split("/"))
    texts = ((name, urllib.parse.unquote(text)) for name, is_pair, text in pairs if is_pair)
    return {name: None if text == _MISSING else text for name, text in texts}


def typed_fields(values: Sequence[Values], known: Collection[str]) -> list[Any]:
    """The fields of Arrow of the columns that all files have in the names of their folders."""
    import pyarrow as pa

    names = [
        name
        for name in dict.fromkeys(n for folders in values for n in folders)
        if name not in known
    ]
    for name in names:
        if any(name not in folders for folders in values):
            raise SourceError(
                f"found files in folders named {name}=... and others that are not; expected all "
                "files below such folders. Give a pattern that matches one kind of them."
            )
    return [pa.field(name, _kind([folders[name] for folders in values])) for name in names]


def _kind(texts: Sequence[str | None]) -> Any:
    """The smallest type of pyarrow's that holds all values: int32, int64, or texts."""
    import pyarrow as pa

    known = [text for text in texts if text is not None]
    if not known or any(not text.removeprefix("-").isdecimal() for text in known):
        return pa.string()
    numbers = [int(text) for text in known]
    for kind in (np.int32, np.int64):
        if np.iinfo(kind).min <= min(numbers) and max(numbers) <= np.iinfo(kind).max:
            return pa.from_numpy_dtype(kind)
    return pa.string()
