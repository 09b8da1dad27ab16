"""What Beam asks of the methods of a DoFn, found out once for its class.

Beam looks through the signatures of all methods of a DoFn for parameters of its own, several times
for each one that is put into a pipeline and again on the worker: as long as a small step takes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from beamjax._beam_compat import INSPECT, get_function_args_defaults

_Found = tuple[list[str], list[Any]]


def remember_signatures(cls: type) -> None:
    """Has Beam find the parameters of the methods of a class, and their defaults, where they are
    remembered: it calls `_inspect_NAME` of the object that has it.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if isinstance(method, classmethod):
            method = getattr(cls, name)
        elif inspect.isfunction(method):
            method = functools.partial(method, None)
        else:
            continue
        setattr(cls, f"{INSPECT}{name}", staticmethod(_asked(method)))


def _asked(method: Callable[..., Any]) -> Callable[[], _Found]:
    @functools.cache
    def found() -> _Found:
        return get_function_args_defaults(method)

    def asked() -> _Found:
        names, defaults = found()
        return list(names), list(defaults)

    return asked
