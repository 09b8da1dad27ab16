"""Functions that open a dataset in any process, given by name and JSON arguments.

Specs of sources are read from files, so they may name only functions that are marked for this.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from beamjax.errors import BeamjaxError, SourceError, StructureError
from beamjax.storage.shared_cache import SharedCache

T = TypeVar("T", bound=Callable[..., Any])

_MARK = "_beamjax_opens_dataset"


def opens_dataset(function: T) -> T:
    """Marks a function of a module as one that `from_random_access` may call on workers.

    Args:
      function: takes keyword arguments that JSON can hold, and returns the dataset.

    Returns:
      The same function.
    """
    setattr(function, _MARK, True)
    return function


def is_opener(value: Any) -> bool:
    """Whether `opens_dataset` has marked a function."""
    return callable(value) and getattr(value, _MARK, False) is True


def opener_name(opener: Any) -> tuple[str, str]:
    """The module of an opener and its name there."""
    if not isinstance(opener, str):
        name = opener.__qualname__
        if "." in name:
            raise StructureError(
                f"from_random_access: found the function {name}, expected one at the top of a "
                "module, where workers find it by its name."
            )
        return opener.__module__, name
    module, _, name = opener.partition(":")
    if not module or not name.isidentifier():
        raise StructureError(
            f"from_random_access: found {opener!r:.80}, expected a dataset, or the name of a "
            "function that opens one, such as 'package.module:open_images'."
        )
    return module, name


@dataclasses.dataclass(frozen=True)
class OpenedBy:
    """A dataset, described by the call that opens it."""

    module: str
    name: str
    kwargs: Mapping[str, Any]

    def open(self) -> Any:
        """The dataset. A process opens it once."""
        key = self.module, self.name, self._arguments()
        return _DATASETS.get(key, lambda: _opened(*key))

    def _arguments(self) -> str:
        try:
            text = json.dumps(dict(self.kwargs), sort_keys=True, allow_nan=False)
            if json.loads(text) == dict(self.kwargs):
                return text
            reason = "JSON changes them"
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error)
        raise StructureError(
            f"{self}: found the arguments {self.kwargs!r:.200}, expected values that JSON can "
            f"hold, with strings as keys ({reason})."
        )

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


_DATASETS: SharedCache[Any] = SharedCache(16, lambda _: 1)
"""Open datasets of this process, at most 16."""


def _opened(module: str, name: str, arguments: str) -> Any:
    where = f"{module}:{name}"
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # of any kind: importing runs the user's module
        raise SourceError(
            f"{where}: cannot be imported in process {os.getpid()} ({error}); expected a function "
            "of a module that the launcher and all workers have."
        ) from error
    if not is_opener(function):
        raise SourceError(
            f"{where}: found a {type(function).__name__} that is not marked, expected a function "
            "that opens a dataset, decorated by beamjax.opens_dataset."
        )
    try:
        return function(**json.loads(arguments))
    except BeamjaxError:
        raise
    except Exception as error:
        raise SourceError(
            f"{where}({arguments}): cannot open the dataset ({type(error).__name__}: {error})."
        ) from error
