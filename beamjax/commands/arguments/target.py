"""A function by the text that names it: `package.module:function` or `path/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from beamjax._text import closest, hint, listed
from beamjax.errors import OptionsError

EXPECTED = "module:function or file.py:function"


def find_target(text: str) -> Callable[..., Any]:
    """Imports a module and takes a function out of it.

    The folder of a file, or the current one for a module, is put on `sys.path`, as `python` does.
    Functions of a file travel to workers by value, as those of a script do.

    Args:
      text: `module:attribute` or `path.py:attribute`, the attribute with dots for those of objects.

    Raises:
      OptionsError: there is no such module or attribute, or it can't be called.
      Exception: what the module raises while it is imported.
    """
    where, colon, attribute = text.rpartition(":")
    if not colon or not where or not attribute:
        module = _module(where or attribute or text) if _is_there(where or attribute) else None
        there = "" if module is None else f"; functions there: {listed(functions_of(module))}"
        raise OptionsError(f"{text}: found no function, expected {EXPECTED}{there}")
    module = _module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = functions_of(module) if found is module else _public(found)
            raise OptionsError(
                f"{where}: found no {part!r}, expected one of: {listed(names)}{hint(part, names)}"
            )
        found = getattr(found, part)
    if not callable(found):
        names = functions_of(module)
        raise OptionsError(
            f"{text}: found {_kind(found)}, expected a function; those there: {listed(names)}"
        )
    return found


def functions_of(module: ModuleType) -> list[str]:
    """Names of the public functions that a module defines, or else of all that it has."""
    callables = [name for name in _public(module) if callable(getattr(module, name))]
    own = [n for n in callables if getattr(getattr(module, n), "__module__", "") == module.__name__]
    return own or callables


def _public(holder: Any) -> list[str]:
    return [name for name in dir(holder) if not name.startswith("_")]


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _is_file(where: str) -> bool:
    return where.endswith(".py") or os.sep in where


def _is_there(where: str) -> bool:
    if _is_file(where):
        return os.path.isfile(where)
    return where.isidentifier() and os.path.isfile(f"{where}.py")


def _module(where: str) -> ModuleType:
    return _load_file(where) if _is_file(where) else _import(where)


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of what the module imports
        raise OptionsError(f"{name}: found no such module{_other_modules(name)}") from None
    except (ImportError, ValueError, TypeError) as error:
        if all(part.isidentifier() for part in name.split(".")):
            raise
        raise OptionsError(f"{name}: found no name of a module, expected {EXPECTED}") from error
    file = getattr(module, "__file__", None)
    if file is not None and os.path.dirname(os.path.abspath(file)) == here:
        cloudpickle.register_pickle_by_value(module)
    return module


def _other_modules(name: str) -> str:
    files = [path.stem for path in Path().glob("*.py")]
    found = closest(name, files)
    if found:
        return f"; did you mean {found!r}?"
    return f", here or among what is installed; files here: {listed(f'{f}.py' for f in files)}"


def _load_file(where: str) -> ModuleType:
    path = os.path.abspath(where)
    if not os.path.isfile(path):
        files = [file.name for file in Path(path).parent.glob("*.py")]
        found = closest(Path(path).name, files)
        also = f"; did you mean {os.path.join(os.path.dirname(where), found)!r}?" if found else ""
        raise OptionsError(f"{where}: found no such file{also}")
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = _name_for(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionsError(f"{where}: found no file of Python, expected {EXPECTED}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def _name_for(path: str) -> str:
    """The name of a file as a module, another one if that name means something else."""
    stem = Path(path).stem
    loaded = sys.modules.get(stem)
    if loaded is not None:
        same = getattr(loaded, "__file__", None) == path
    else:
        found = importlib.util.find_spec(stem) if stem.isidentifier() else None
        same = found is None or found.origin == path
    return stem if same and stem.isidentifier() else f"_beamjax_{stem}"
