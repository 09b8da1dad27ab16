"""Writes and displays the progress of a run, and writes its records, in the launching process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import os
import platform
import re
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import jax
import numpy as np

from beamjax._version import __version__
from beamjax.call import Call
from beamjax.diagnostics.memory import machine_bytes
from beamjax.diagnostics.plan_json import Json
from beamjax.jobs.display import Display
from beamjax.jobs.report import (
    COLUMNS,
    HISTORY,
    MAX_SAMPLES,
    SETUP,
    Curve,
    History,
    Setup,
    read_report,
)
from beamjax.options import OWN, Options, beam_flags
from beamjax.plan.steps import Loop, Plan
from beamjax.runtime.fingerprints import Fingerprint, plan_fingerprint
from beamjax.spans import Thinned
from beamjax.storage.schema import to_plain
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.monitor import Monitor
from beamjax.telemetry.progress import Progress

LOOK_SECONDS = 0.5
"""Seconds between two reads of the records of workers."""
FIRST_PAUSES_SECONDS = (0.03, 0.05, 0.1, 0.2)
"""Seconds between the first samples, so that the report of a short run has some."""
SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
"""Shortest and longest time between two records of the history of a run, in seconds."""
MAX_WARNINGS = 100
"""Largest number of warnings in a report."""
_LOG = logging.getLogger("beamjax")
_SECRET = re.compile("password|passwd|secret|token|credential|api_?key", re.I)
PACKAGES = ("jax", "jaxlib", "numpy", "apache-beam")
"""Packages whose versions are in a report."""


class Recording:
    """Follows one run in a thread: writes and shows its progress, and cancels it on request."""

    # The run continues if a record cannot be made or written, hence the many `suppress`.

    def __init__(
        self, folder: JobFolder, monitor: Monitor, call: Call, display: Display | None,
        reports: bool,
    ):  # fmt: skip
        self._folder = folder
        self._monitor = monitor
        self._call = call
        self._display = display
        self._reports = reports  # whether to write the records that a report needs
        self._samples: Thinned[tuple[float, ...]] = Thinned(MAX_SAMPLES)
        self._last = sample(Progress())
        self._samples.add(self._last)
        self._curves: tuple[Curve, ...] = ()
        self._heard = _Heard()
        self._written = -SHORTEST_SECONDS
        self._over = threading.Event()

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """A context for the run; records it from start to end."""
        if self._reports:
            with contextlib.suppress(Exception):
                self._folder.write(SETUP, to_plain(self._setup()), make=False)
            _LOG.addHandler(self._heard)
        thread = threading.Thread(target=self._watch, name="beamjax progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._look()
            if self._display is not None:
                with contextlib.suppress(Exception):
                    self._display.close()
            if self._reports:
                _LOG.removeHandler(self._heard)
                self._write()

    def _watch(self) -> None:
        if self._reports:  # so that a short run has samples, too
            for pause in FIRST_PAUSES_SECONDS:
                if self._over.wait(pause):
                    return
                self._sample(self._monitor.progress())
        while not self._over.wait(LOOK_SECONDS * self._folder.slowness):
            self._look()

    def _look(self) -> None:
        progress = self._monitor.progress()
        with contextlib.suppress(Exception):  # the work continues without records of its progress
            self._folder.write_progress(progress)
            if self._folder.cancel_requested():
                self._monitor.cancel()
        if self._reports:
            self._sample(progress)
        if self._display is not None:
            with contextlib.suppress(Exception):  # stderr may be closed
                self._display.update(progress)

    def _sample(self, progress: Progress) -> None:
        """Adds a sample, and writes the history if the last record is old enough."""
        self._last = sample(progress)
        self._samples.add(self._last)
        pause = (
            min(max(SHORTEST_SECONDS, progress.seconds / 50), LONGEST_SECONDS)
            * self._folder.slowness
        )
        if progress.seconds - self._written >= pause:
            self._written = progress.seconds
            self._write()

    def returned(self, value: Any) -> None:
        """Records the result of the run."""
        if self._reports:
            with contextlib.suppress(Exception):
                self._curves = tuple(curves(self._call.plan, value))

    def _write(self) -> None:
        monitor = self._monitor
        history = History(
            provenance=monitor.provenance, samples=columns([*self._samples.entries, self._last]),
            round_ends=monitor.moments("round"), checkpoints=monitor.moments("checkpoint"),
            spans=monitor.trace, curves=self._curves,
            warnings=tuple(self._heard.messages),
        )  # fmt: skip
        with contextlib.suppress(Exception):
            self._folder.write(HISTORY, to_plain(history), make=False)

    def _setup(self) -> Setup:
        plan: Json | None = None
        fingerprint: Fingerprint = {}
        with contextlib.suppress(Exception):
            plan = self._call.plan_json()
        with contextlib.suppress(Exception):
            fingerprint = plan_fingerprint(self._call.plan, self._call.options)
        options = shown_options(self._call.options)
        return Setup(options=options, machine=machine(), plan=plan, fingerprint=fingerprint)


def sample(progress: Progress) -> tuple[float, ...]:
    """The numbers of a sample, in the order of `COLUMNS`."""
    done = progress.done
    values = [getattr(done if hasattr(done, name) else progress, name) for name in COLUMNS]
    return tuple(round(value, 4) for value in values)


def columns(samples: list[tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Samples by column; the last one may be in the list twice."""
    rows = samples[:-1] if samples[-2:-1] == samples[-1:] else samples
    return {name: tuple(row[i] for row in rows) for i, name in enumerate(COLUMNS)}


class _Heard(logging.Handler):
    """Collects the warnings of a log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            if len(self.messages) < MAX_WARNINGS:
                self.messages.append(record.getMessage()[:4000])
            # Where no logging is configured, Python prints warnings only if no handler takes them.
            first = next(h for h in _LOG.handlers if isinstance(h, _Heard))
            if self is first and logging.lastResort is not None and not _has_handler(record):
                logging.lastResort.handle(record)


def _has_handler(record: logging.LogRecord) -> bool:
    """Whether a handler of the user takes a record."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if not all(isinstance(handler, _Heard) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def save_report(folder: JobFolder, options: Options) -> None:
    """Writes the file of the option `report`, or a warning to the log if that fails."""
    if options.report is None:
        return
    try:
        read_report(folder).save(options.report)
    except Exception as error:  # a run does not fail for its report
        _LOG.warning("report: %s", error)


def shown_options(options: Options) -> dict[str, str]:
    """Returns the options that differ from their defaults, as text without secrets."""
    usual = {f.name: f.default for f in fields(Options)}
    values = {name: getattr(options, name) for name in OWN}
    texts = {name: str(value) for name, value in values.items() if value != usual[name]}
    texts |= {name: str(value) for name, value in beam_flags(options.beam).items()}
    return {k: "(not shown)" if _SECRET.search(k) else v for k, v in texts.items()}


def machine() -> dict[str, str]:
    """Returns versions, and the machine of this process."""
    facts = {"beamjax": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    facts["system"] = platform.platform()
    facts["host"] = platform.node()
    facts["processors"] = str(os.cpu_count())
    if nbytes := machine_bytes():
        facts["memory"] = f"{nbytes / 2**30:.1f} GiB"
    with contextlib.suppress(Exception):
        devices = jax.devices()
        facts["devices"] = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    return facts


def curves(plan: Plan, result: Any) -> Iterator[Curve]:
    """Yields the vectors of floats in a result that have a value for each round of a loop."""
    lengths = {step.rounds for step in plan.steps if isinstance(step, Loop) and step.rounds}
    for path, leaf in jax.tree_util.tree_flatten_with_path(result)[0]:
        if not isinstance(leaf, jax.Array | np.ndarray) or leaf.ndim != 1:
            continue
        if leaf.shape[0] not in lengths or not jax.numpy.issubdtype(leaf.dtype, np.floating):
            continue
        count = leaf.shape[0]
        rounds = np.linspace(0, count - 1, min(count, MAX_SAMPLES)).round().astype(int)
        values = np.asarray(leaf)[rounds].astype(np.float64).tolist()
        where = f"result{jax.tree_util.keystr(path)}"
        known = tuple(value if math.isfinite(value) else None for value in values)
        yield Curve(where, tuple(rounds.tolist()), known, count)
