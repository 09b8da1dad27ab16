"""Checks an installed wheel: `python -W error -I check_wheel.py beamjax.whl`."""

import pathlib
import sys
import sysconfig
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
assert "beamjax/py.typed" in names, names
pages = "beamjax/diagnostics/pages"
assert {f"{pages}/style.css", f"{pages}/page.js"} <= set(names), names
tops = {name.split("/")[0] for name in names}
assert all(top.startswith("beamjax") for top in tops), f"the wheel fills site-packages with {tops}"

import beamjax  # noqa: E402

assert "apache_beam" not in sys.modules, "importing beamjax imports apache_beam"
import beamjax.interpreters  # noqa: E402
import beamjax.pipelines  # noqa: E402

site = pathlib.Path(sysconfig.get_path("purelib"))
for module in (beamjax, beamjax.interpreters, beamjax.pipelines):
    assert site in pathlib.Path(module.__file__).parents, module.__file__
print(f"{pathlib.Path(sys.argv[1]).name}: {len(names)} files, beamjax {beamjax.__version__}: ok")
