"""One JAX MapReduce program, the same numbers in-process and on Apache Beam."""

from __future__ import annotations as _annotations

import importlib as _importlib
import importlib.util as _util
import re as _re

from beamjax._version import __version__ as __version__

_importlib.import_module("beamjax._unraisable")

# The stub, which type checkers read, is the table of the public names too.
with open(f"{__file__}i", encoding="utf-8") as _stub:
    _IMPORTS = _re.findall(r"^from beamjax\.(\S+) import ([A-Za-z]\w*) as", _stub.read(), _re.M)
_MODULE_OF = {name: module for module, name in _IMPORTS}

__all__ = list(_MODULE_OF)


def __dir__() -> list[str]:
    # Without submodules, which become attributes when they are imported: they are not public.
    return [*(name for name in globals() if name.startswith("__")), *_MODULE_OF]


def __getattr__(name: str) -> object:
    """Imports a public name at its first use: that of all modules would take as long as a call."""
    module = _MODULE_OF.get(name)
    if module is not None:
        globals()[name] = value = getattr(_importlib.import_module(f"beamjax.{module}"), name)
        return value
    if not name.startswith("__") and _util.find_spec(f"beamjax.{name}") is not None:
        return _importlib.import_module(f"beamjax.{name}")
    raise AttributeError(f"module 'beamjax' has no attribute {name!r}")
