"""Checks an installed wheel against its tree: `python -W error -I check_wheel.py WHEEL TREE`."""

import pathlib
import sys
import sysconfig
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
assert "beamjax/py.typed" in names, names
pages = "beamjax/diagnostics/pages"
bundled = ("style.css", "page.js", "templates/plan.html", "vendor/dagre.min.js", "vendor/README.md")
assert {f"{pages}/{name}" for name in bundled} <= set(names), names
tops = {name.split("/")[0] for name in names}
assert all(top.startswith("beamjax") for top in tops), f"the wheel fills site-packages with {tops}"

tree = pathlib.Path(sys.argv[2])
folders = ("beamjax", "beamjax/interpreters", "beamjax/pipelines")
files = {p.relative_to(tree).as_posix() for f in folders for p in (tree / f).rglob("*.py")}
modules = {name for name in names if name.endswith(".py")}
assert modules == files, f"the wheel and the tree differ in {sorted(modules ^ files)}"

import beamjax  # noqa: E402

assert "apache_beam" not in sys.modules, "importing beamjax imports apache_beam"
import beamjax.interpreters  # noqa: E402
import beamjax.pipelines  # noqa: E402

site = pathlib.Path(sysconfig.get_path("purelib"))
for module in (beamjax, beamjax.interpreters, beamjax.pipelines):
    assert site in pathlib.Path(module.__file__).parents, module.__file__
print(f"{pathlib.Path(sys.argv[1]).name}: {len(names)} files, beamjax {beamjax.__version__}: ok")
