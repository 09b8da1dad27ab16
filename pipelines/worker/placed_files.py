"""Writes members of placed values to files of a store or of the results of a run."""

from __future__ import annotations

import numpy as np

from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.store import Store
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.spans import Spans, timed
from beamjax.storage.arrays import encode_arrays

FILE_BYTES = 4 << 20
"""Bytes of members that a bundle collects before it writes them to files."""


class PlacedFiles:
    """The files of a placed value that one bundle writes, each with the members of many shards."""

    def __init__(
        self,
        store: Store,
        name: str,
        stem: str,
        results: MaterializedOutputs = NOTHING,
        cached: bool = False,
    ):
        self.store = store
        self.name = name
        self.stem = stem
        # If the value is a materialized result, it is written there instead.
        self.results = results
        # Whether to cache what is written, for later passes in this process. The stem must then be
        # unique among all runs.
        self.cached = cached
        self.parts: list[tuple[int, int]] = []  # first member, number of members
        self._waiting: list[tuple[int, np.ndarray]] = []
        self._nbytes = 0

    def add(self, start: int, members: np.ndarray, spans: Spans) -> None:
        """Adds consecutive members, beginning with member `start`."""
        self._waiting.append((start, members))
        self._nbytes += members.nbytes
        if self._nbytes >= FILE_BYTES:
            self.flush(spans)

    def flush(self, spans: Spans) -> None:
        """Writes what was added: each run of consecutive members to a file."""
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        run: list[tuple[int, np.ndarray]] = []
        for start, members in sorted(waiting, key=lambda block: block[0]):
            if run and start != run[-1][0] + len(run[-1][1]):
                self._write(run, spans)
                run = []
            run.append((start, members))
        if run:
            self._write(run, spans)

    def _write(self, run: list[tuple[int, np.ndarray]], spans: Spans) -> None:
        with timed(spans, f"write {self.name}", "transfer"):
            start, members = run[0][0], np.concatenate([members for _, members in run])
            self.parts.append((start, len(members)))
            if self.name in self.results.folders:
                self.results.write(self.name, start, members)
                return
            # A file is named after the members in it. A bundle that is retried may cut the members
            # into other files, which hold the same values.
            name = MembersSource.file_name(self.stem, start, len(members))
            if self.cached:
                self.store.write_members(name, members)
            else:
                self.store.write(name, encode_arrays([members]))
