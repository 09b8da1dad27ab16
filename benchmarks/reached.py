"""A pytest plugin that records which functions of beamjax each test calls.

    REACHED=folder python -m pytest -p benchmarks.reached

Each worker of pytest-xdist appends to a file of its own in the folder, one JSON object a test: its
name, its seconds, and the functions as "file:first line". Calls in other processes, such as
workers that a test starts, are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = f"{_ROOT / 'beamjax'}{os.sep}"
_LINKED = ("interpreters/", "pipelines/")
"""Folders at the root of the tree that are links in the package."""
_TOOL = sys.monitoring.PROFILER_ID

_called: set[str] = set()


def _on_start(code: CodeType, offset: int) -> Any:
    # Without a look at the file: some tests forbid that.
    if code.co_filename.startswith(_PACKAGE):
        file = code.co_filename[len(_PACKAGE) :].replace(os.sep, "/")
        file = file if file.startswith(_LINKED) else f"beamjax/{file}"
        _called.add(f"{file}:{code.co_firstlineno}")
    return sys.monitoring.DISABLE  # Until the next test: one event for each function is enough.


def pytest_configure(config: pytest.Config) -> None:
    sys.monitoring.use_tool_id(_TOOL, "reached")
    sys.monitoring.register_callback(_TOOL, sys.monitoring.events.PY_START, _on_start)
    sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)


def pytest_unconfigure(config: pytest.Config) -> None:
    sys.monitoring.set_events(_TOOL, 0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _called.clear()
    sys.monitoring.restart_events()
    start = time.perf_counter()
    yield
    record = {
        "test": item.nodeid,
        "seconds": round(time.perf_counter() - start, 3),
        "functions": sorted(_called),
    }
    with open(Path(os.environ["REACHED"]) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
