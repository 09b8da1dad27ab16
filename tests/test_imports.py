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
