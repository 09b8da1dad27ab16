"""The command `doctor`: what it looks at, what it prints, and its exit status."""

import importlib.metadata
import json
import types

import jax
import pytest

from beamjax.commands import cli, doctor
from beamjax.commands.doctor import ABSENT, MISSING, OK, WARNING, Finding
from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import prism_server
from beamjax.pipelines.runners import spec
from beamjax.pipelines.runners.connect import make_runner


def test_versions_of_python_and_packages(monkeypatch):
    versions = {(3, 10, 9): MISSING, (3, 11, 0): OK, (3, 13, 7): OK, (3, 14, 0): WARNING}
    assert {v: doctor.check_python(v).status for v in versions} == versions
    assert [f.status for f in doctor.check_packages()] == [OK]

    class Package:
        metadata = types.MappingProxyType({"Name": "beamjax"})
        requires = ("no-such-package>=1", "numpy<1", "y; python_version<'3'", "x; extra=='a'")

    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [Package])
    *missing, jax_package, _ = doctor.check_packages()
    assert [(f.name, f.status, f.remedy) for f in missing] == [
        ("no-such-package", MISSING, "pip install 'no-such-package>=1'"),
        ("numpy", MISSING, "pip install 'numpy<1'"),
    ]
    assert "beamjax needs numpy<1" in missing[1].found
    assert (jax_package.name, jax_package.status) == ("jax", WARNING)


def test_devices_and_what_is_tried(monkeypatch):
    for required, status in ((None, OK), ("cpu", OK), ("gpu", MISSING), ("tpu", MISSING)):
        found = doctor.check_platform(required)
        assert found.status == status
        assert f"jaxlib: {importlib.metadata.version('jaxlib')}" in found.found
        assert bool(found.remedy) == (status == MISSING)
    assert [doctor.check_probe(name).status for name in doctor.PROBES] == [OK, OK]

    def broken(*_, **__):
        raise RuntimeError("no device")

    monkeypatch.setattr(jax, "print_environment_info", broken)
    monkeypatch.setitem(doctor.PROBES, "body", (broken, "install it"))
    for found in (doctor.check_platform(None), doctor.check_probe("body")):
        assert (found.status, found.found) == (MISSING, "RuntimeError: no device")
        assert found.remedy


def test_folders(tmp_path, monkeypatch):
    found = doctor.check_folder(str(tmp_path), "temporary folder")
    assert (found.status, "GiB free" in found.found) == (OK, True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor, "FREE_BYTES", 2**60)
    found = doctor.check_folder(str(tmp_path), "temporary folder")
    assert (found.status, found.remedy[:9]) == (WARNING, "free some")
    for folder in ("/proc/no-such", "nosuch://bucket/x"):
        found = doctor.check_folder(folder, "work folder")
        assert (found.status, found.found.startswith(f"{folder}: ")) == (MISSING, True)
        assert "work_folder" in found.remedy


def test_runners(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:  # On a machine with everything.
        patch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        patch.setattr(spec, "find_spec", lambda name: name)
        patch.setenv("BEAMJAX_CACHE", str(tmp_path / "cache"))
        found = doctor.check_runner("PrismRunner", True)
        assert (found.status, found.remedy) == (MISSING, "run `beamjax prism install`")
        prism_server.installed().touch()
        assert {doctor.check_runner(name, True).status for name in doctor.RUNNERS} == {OK}
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(spec, "find_spec", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    parts = {
        "PrismRunner": "install Go",
        "FlinkRunner": "install Java 11 or 17",
        "SparkRunner": "and Apache Maven",
        "DataflowRunner": "pip install -e '.[dataflow]'",
    }
    for name, part in parts.items():
        statuses = [doctor.check_runner(name, required).status for required in (True, False)]
        assert statuses == [MISSING, ABSENT]
        assert part in doctor.check_runner(name, True).remedy
    with pytest.raises(
        OptionsError, match=r"^runner: found 'DataflowRunner', but its packages are"
    ):
        make_runner("DataflowRunner")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path / "file"))
    assert "BEAMJAX_CACHE" in doctor.check_runner("PrismRunner", False).remedy


FOUND = [
    Finding("Python", OK, "3.12.1"),
    Finding("JAX", WARNING, "cpu\njaxlib: 1", "install jaxlib"),
    Finding("FlinkRunner", ABSENT, "can't be used", "install Java"),
]
LINES = """\
ok       Python: 3.12.1
warning  JAX: cpu
         jaxlib: 1
         -> install jaxlib
-        FlinkRunner: can't be used
         -> install Java
"""


def test_what_is_printed(monkeypatch, capsys):
    found, asked = list(FOUND), []
    monkeypatch.setattr(doctor, "examine", lambda *required: asked.append(required) or iter(found))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{LINES}\nnothing is missing\n"
    found.append(Finding("devices", MISSING, "cpu", "install a driver"))
    flags = ["--require-platform=gpu", "--require-runner=flinkrunner", "--work-folder=gs://b/x"]
    assert cli.main(["doctor", *flags]) == 1
    assert asked[-1] == ("gpu", ("FlinkRunner",), "gs://b/x")
    end = "FAILED   devices: cpu\n         -> install a driver\n\n1 to fix: devices\n"
    assert capsys.readouterr().out == f"{LINES}{end}"
    assert cli.main(["doctor", "--json"]) == 1
    captured = capsys.readouterr()
    assert [Finding(**record) for record in json.loads(captured.out)["findings"]] == found
    assert captured.err.startswith(LINES)
    assert cli.main(["doctor", "--require-platform=npu"]) == 2


def test_all_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "check_probe", lambda name: Finding(name, OK, ""))
    names = [f.name for f in doctor.examine("gpu", ["PrismRunner"], str(tmp_path))]
    assert names == [
        "Python", "beamjax", "JAX", *doctor.PROBES, "temporary folder", "work folder",
        *doctor.RUNNERS,
    ]  # fmt: skip
