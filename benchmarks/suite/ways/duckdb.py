"""DuckDB in this process, with its own threads."""

from __future__ import annotations

import duckdb

from benchmarks.suite.sums import opened
from benchmarks.suite.ways import Call, Job


def call(job: Job) -> Call:
    return opened(job).by_duckdb(duckdb)
