"""One JAX MapReduce program, the same numbers in-process and on Apache Beam."""

from __future__ import annotations as _annotations

import importlib as _importlib
import importlib.util as _util

from beamjax._version import __version__ as __version__

# Type checkers take this to be true. To import `typing` takes longer than all else here.
TYPE_CHECKING = False

_importlib.import_module("beamjax._unraisable")


def _load() -> list[str]:
    """Imports the public names into this module; returns them."""
    public = vars(_importlib.import_module("beamjax.public"))
    names = [name for name in public if not name.startswith("_")]
    globals().update({name: public[name] for name in names})
    return names


def __dir__() -> list[str]:
    # Without submodules, which become attributes when they are imported: they are not public.
    return [*(name for name in globals() if name.startswith("__")), *_load()]


if TYPE_CHECKING:
    from beamjax.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Imports public names at first use, so that the command `beamjax` starts without JAX."""
        if name == "__all__":  # of `from beamjax import *`
            return _load()
        if not name.startswith("__"):
            if _util.find_spec(f"beamjax.{name}") is not None:
                return _importlib.import_module(f"beamjax.{name}")
            _load()
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module 'beamjax' has no attribute {name!r}")
