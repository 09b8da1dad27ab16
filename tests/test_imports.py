"""Who may import what, read off the source; and that every file has its tests."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "beamjax",
    "beamjax/commands",
    "beamjax/pages",
    "beamjax/sources",
    "interpreters",
    "pipelines",
)
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
HIDDEN = ("jax._src", "jax.interpreters", "jaxlib")


def named(path):
    """Dotted names that a file imports or spells out, e.g. `jax.interpreters.ad`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from imported(path)
    yield from (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def imported(path):
    """Dotted names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def begins(name, *prefixes):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def offenders(names, *forbidden):
    return [name for name in names if begins(name, *forbidden)]


def in_folder(folder):
    return [pytest.param(p, id=p.stem) for p in FILES if p.relative_to(ROOT).parts[0] == folder]


@pytest.mark.parametrize("path", in_folder("interpreters"))
def test_interpreters_know_nothing_of_beam(path):
    assert not offenders(imported(path), "apache_beam", "beamjax.pipelines")


@pytest.mark.parametrize("path", in_folder("pipelines"))
def test_pipelines_know_nothing_of_interpreters(path):
    assert not offenders(imported(path), "beamjax.interpreters")


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "_compat.py"], ids=lambda p: p.stem)
def test_only_compat_names_what_jax_hides(path):
    assert not offenders(named(path), *HIDDEN)


def test_the_version_of_jax_is_only_told():
    """In messages, in what a plan was made with; no file but `_compat` may depend on it."""
    telling = {path.stem for path in FILES if offenders(named(path), "jax.__version__")}
    assert telling <= {"_compat", "bodies", "lower", "restaging", "verification"}
    assert not [path for path in FILES if "__version_info__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", in_folder("beamjax"))
def test_the_front_door_imports_beam_only_when_it_is_used(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    top = [n for n in tree.body if n not in typing]
    for node in top:
        if isinstance(node, ast.Import):
            assert not offenders([a.name for a in node.names], "apache_beam", "beamjax.pipelines")
        elif isinstance(node, ast.ImportFrom):
            assert not begins(node.module, "apache_beam", "beamjax.pipelines")


WITHOUT_JAX = """
    accumulators arrays checkpoints digit_bytes digits dyadic errors exact_sum extremes liveness
    options partials plan process_ids products progress records rounding running timeline tracker
""".split()


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_data_and_arithmetic_need_no_jax(name):
    found = imported(ROOT / "beamjax" / f"{name}.py")
    assert not offenders(found, "jax", "apache_beam", "beamjax.interpreters", "beamjax.pipelines")


# --- what an import does


def python(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_beamjax_imports_no_beam_and_starts_no_backend():
    assert python("""
import sys
import beamjax, jax
beamjax.run
from jax._src import xla_bridge
beams = [name for name in sys.modules if name.startswith(("apache_beam", "beamjax.pipelines"))]
print(beams, xla_bridge.backends_are_initialized())
""") == "[] False"  # fmt: skip


def test_jax_is_imported_with_the_first_name():
    assert python("""
import sys
import beamjax
print(beamjax.__version__ > "0", "jax" in sys.modules, "numpy" in sys.modules)
from beamjax import *
print(map_fn is beamjax.map_fn, beamjax.sources.Source is Source, "jax" in sys.modules)
print(hasattr(beamjax, "nothing"), {"run", "verify", "Source"} <= set(dir(beamjax)))
""").split() == "True False False True True True False True".split()  # fmt: skip


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["bench", "--help"]])
def test_help_of_commands_imports_no_jax(argv):
    told = python(f"""
import sys
from beamjax import cli
cli.main({argv})
print([name for name in ("jax", "numpy", "apache_beam") if name in sys.modules])
""")
    assert told.endswith("\n[]")


def test_planning_and_the_local_runner_need_no_beam():
    assert python("""
import sys
import numpy as np, beamjax
total = beamjax.program(clients=4)(lambda x: beamjax.reduce_sum(x))
print(beamjax.run(total, np.ones(4, "float32"), runner="local"), "apache_beam" in sys.modules)
beamjax.explain(total, np.ones(4, "float32"))
print("apache_beam" in sys.modules)
""").split() == ["4.0", "False", "False"]  # fmt: skip


def test_pages_are_imported_when_one_is_made():
    told = python("""
import sys
import numpy as np, beamjax
total = beamjax.program(clients=4)(lambda x: beamjax.reduce_sum(x))
beamjax.run(total, np.ones(4, "float32"), runner="local")
found = beamjax.explain(total, np.ones(4, "float32"))
print([name for name in sys.modules if name.startswith("beamjax.pages")])
found.to_html()
print("beamjax.pages.plan_page" in sys.modules, "apache_beam" in sys.modules)
""")
    assert told == "[]\nTrue False"


# --- every file has its tests

TESTED_ELSEWHERE = {
    "array_source": "test_sources",
    "numerics": "test_same_bits",
    "provenance": "test_same_bits",
    "xla_threads": "test_same_bits",
    "collected_source": "test_pcollections",
    "one_member": "test_pcollections",
    "npy_header": "test_npy_parts",
    "leaf_checks": "test_sources",
    "member_files": "test_members",
    "placed": "test_kept",
    "fetching": "test_kept",
    "__main__": "test_cli",
    "_compat": "test_transformations",
    "_version": "test_api",
    "table_parts": "test_grouping",
    "zarr_chunks": "test_bad_data",
    "block_source": "test_table_source",
    "bodies": "test_workers",
    "checkpoint_folder": "test_keepers",
    "checkpoint_records": "test_keepers",
    "checkpointing": "test_keepers",
    "cluster_options": "test_clusters",
    "combining": "test_reductions",
    "compile_time": "test_progress",
    "counting": "test_unknown_sizes",
    "creations": "test_rules",
    "derivatives": "test_transformations",
    "dataset_openers": "test_random_access_source",
    "digit_bytes": "test_accumulators",
    "digits": "test_exact_sum",
    "dimensions": "test_unknown_sizes",
    "dyadic": "test_exact_sum",
    "errors": "test_bad_input",
    "evaluate": "test_run",
    "planning": "test_run",
    "reasons": "test_explanation",
    "piece_text": "test_explanation",
    "total_text": "test_explanation",
    "costs": "test_cost",
    "execution": "test_run",
    "extremes": "test_accumulators",
    "fact_types": "test_explanation",
    "facts": "test_explanation",
    "flat_program": "test_flatten",
    "flatten": "test_run",
    "flink": "test_clusters",
    "flink_cluster": "test_cluster_faults",
    "flink_command": "test_cli",
    "suggestions": "test_cli_target",
    "arguments": "test_cli_values",
    "value_help": "test_cli_values",
    "command_lines": "test_cli_jobs",
    "output": "test_cli_run",
    "verify": "test_cli_run",
    "explain": "test_cli_run",
    "charts": "test_run_page",
    "drawing": "test_plan_page",
    "graph": "test_plan_page",
    "markup": "test_plan_page",
    "mermaid": "test_explanation",
    "recording": "test_report",
    "shell": "test_plan_page",
    "source_lines": "test_plan_page",
    "watching": "test_jobs",
    "words": "test_plan_page",
    "bench": "test_cli_run",
    "folds": "test_rules",
    "guard": "test_processes",
    "shuffling": "test_grouping",
    "joined_source": "test_joining",
    "folding": "test_keyed",
    "keyed_results": "test_keyed",
    "keyed_table": "test_keyed",
    "hoist": "test_users_programs",
    "job_folder": "test_jobs",
    "job_results": "test_jobs",
    "indexing": "test_rules",
    "flat_chunks": "test_store",
    "jars": "test_clusters",
    "job_servers": "test_processes",
    "lanes": "test_lower",
    "launch": "test_driver",
    "layouts": "test_sharding",
    "leaves": "test_api",
    "levels": "test_split",
    "lines": "test_flatten",
    "lower": "test_run",
    "member_stacks": "test_random_access_source",
    "memberwise": "test_rules",
    "meters": "test_progress",
    "pace": "test_passes",
    "monitor": "test_progress",
    "outputs": "test_run",
    "partials": "test_accumulators",
    "picks": "test_rules",
    "pieces": "test_split",
    "place": "test_rules",
    "placements": "test_api",
    "places": "test_place",
    "process_ids": "test_jobs",
    "probes": "test_checks",
    "public": "test_api",
    "prism": "test_clusters",
    "tfrecord_frames": "test_tfrecord_source",
    "products": "test_accumulators",
    "ravels": "test_users_programs",
    "readings": "test_rules",
    "record_source": "test_tfrecord_source",
    "records": "test_failures",
    "reshaped": "test_regrouping",
    "rounding": "test_exact_sum",
    "running": "test_accumulators",
    "shards": "test_workers",
    "sizing": "test_run",
    "spark": "test_clusters",
    "sliced": "test_regrouping",
    "split": "test_run",
    "streaming": "test_reading",
    "stage": "test_bad_input",
    "tasks": "test_workers",
    "tracker": "test_keepers",
    "tools": "test_cli",
    "unknown": "test_unknown_sizes",
    "values": "test_driver",
    "waiting": "test_clusters",
    "wanted": "test_place",
    "worker_pool": "test_clusters",
    "writes": "test_users_programs",
    "dealt_rows": "test_grouping",
    "memory_limit": "test_memory",
    "arrow_types": "test_arrow_columns",
    "refs": "test_store",
    "option_checks": "test_options",
    "live_sources": "test_source_base",
    "stored_dtypes": "test_arrays",
    "memory_text": "test_memory",
    "working_memory": "test_memory",
}


@pytest.mark.parametrize("path", [p for p in FILES if p.stem != "__init__"], ids=lambda p: p.stem)
def test_every_file_has_a_file_of_tests(path):
    command = "cli_" if path.parent.name == "commands" else ""
    own = ROOT / "tests" / f"test_{command}{path.stem}.py"
    if not own.exists():
        assert path.stem in TESTED_ELSEWHERE, f"{path} has no tests/test_{path.stem}.py"
        own = ROOT / "tests" / f"{TESTED_ELSEWHERE[path.stem]}.py"
    assert own.exists()
