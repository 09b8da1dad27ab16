"""The modules that a worker process imports."""

import subprocess
import sys

CODE = """
import sys
import beamjax.pipelines.worker.map_shards
print("\\n".join(name for name in sys.modules if name.partition(".")[0] == "beamjax"))
"""

LAUNCHING = (
    "bodies.export", "bodies.python_bodies", "call", "commands", "diagnostics", "execution",
    "interpreters", "jobs", "ops", "options", "pipelines.graph", "pipelines.runners",
    "pipelines.worker.lost_workers", "pipelines.worker.worker_errors", "plan.dropping",
    "runtime.cached_shards", "runtime.driver", "runtime.failing_members", "runtime.inputs",
    "sources.array_source", "sources.arrays", "sources.blocks", "sources.padding",
    "sources.records", "sources.streams", "sources.tables", "telemetry.interrupts",
    "telemetry.job_folder", "telemetry.progress",
)  # fmt: skip
"""What the launching process needs, and workers need only for some programs and sources."""


def test_workers_import_what_they_need_to_compute_shards():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    names = [name.removeprefix("beamjax.") for name in done.stdout.split()]
    assert "runtime.shard_executor" in names
    packages = tuple(f"{name}." for name in LAUNCHING)
    assert [name for name in names if name in LAUNCHING or name.startswith(packages)] == []
    assert len(names) <= 59, names
