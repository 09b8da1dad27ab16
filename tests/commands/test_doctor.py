"""The command `doctor`: what it looks at, what it prints, and its exit status."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from beamjax.commands import checks, cli, doctor
from beamjax.commands.checks import ABSENT, FAILED, OK, WARNING, Finding


def by_name(findings):
    return {finding.name: finding for finding in findings}


@pytest.fixture
def answers(monkeypatch):
    """What the probes answer, and `nvidia-smi`."""
    found = {
        "devices": ({"platform": "cpu", "devices": ["cpu"], "memory": [None]}, ""),
        "body": ({"seconds": 0.1}, ""),
        "job": ({"seconds": 0.2}, ""),
    }
    monkeypatch.setattr(checks, "probe", found.__getitem__)
    monkeypatch.setattr(checks, "nvidia_gpus", lambda: found.get("gpus"))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return found


def gpu(driver="570.86.10"):
    return {
        "name": "NVIDIA L4", "memory.total": "23034 MiB", "memory.used": "1 MiB",
        "driver_version": driver,
    }  # fmt: skip


# --- Python and packages


def test_python():
    for version, status in (
        ((3, 10, 9), FAILED), ((3, 11, 0), OK), ((3, 13, 7), OK), ((3, 14, 0), WARNING)
    ):  # fmt: skip
        found = checks.check_python(version)
        assert found.status == status
        assert bool(found.mend) == (status != OK)


def test_packages(monkeypatch):
    found = by_name(checks.check_packages())
    assert {"jax", "apache-beam", "numpy"} <= set(found)
    assert "pytest" not in found  # an extra
    for name in ("jax", "apache-beam"):
        assert (found[name].status, found[name].found) == (OK, importlib.metadata.version(name))
    asked = ["no-such-package>=1", "numpy<1", "numpy>=1; python_version < '3'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: asked)
    findings = list(checks.check_packages())[1:]
    assert [(f.name, f.status, f.mend) for f in findings] == [
        ("no-such-package", FAILED, "pip install 'no-such-package>=1'"),
        ("numpy", FAILED, "pip install 'numpy<1'"),
    ]
    assert "expected <1" in findings[1].found

    def requires(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert [f.status for f in checks.check_packages()] == [OK, WARNING]


def test_jaxlib_and_plugins(monkeypatch):
    plugin = "jax-cuda12-plugin"
    for versions, expected in (
        ({"jax": "0.12.0", "jaxlib": "0.12.0"}, [OK]),
        ({"jax": "0.12.1", "jaxlib": "0.12.0"}, [WARNING]),
        ({"jax": "0.12.1"}, [FAILED]),
        ({"jax": "0.12.0.1", "jaxlib": "0.12.0.1", plugin: "0.12.0"}, [OK, OK]),
        ({"jax": "0.12.0", "jaxlib": "0.12.0", plugin: "0.10.2"}, [OK, FAILED]),
    ):
        monkeypatch.setattr(checks, "_version", versions.get)
        monkeypatch.setattr(checks, "_plugins", lambda v=versions: [n for n in v if n == plugin])
        found = list(checks.check_jaxlib())
        assert [f.status for f in found] == expected, versions
    assert found[1].mend.startswith("pip install 'jax[cuda12]==0.12.0'")


# --- devices


def test_a_memory_fraction_that_is_set_twice(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    found = by_name(checks.check_environment())
    assert found["memory fraction"].status == FAILED
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert "memory fraction" not in by_name(checks.check_environment())


def test_probes_of_this_machine(monkeypatch):
    found, error = checks.probe("devices")
    assert (found["platform"], len(found["devices"]), error) == ("cpu", 8, "")
    monkeypatch.setattr(checks, "TIMEOUT", 0.01)
    assert checks.probe("devices") == (None, "no answer in 0.01 s")


def test_a_machine_without_a_gpu(answers):
    for required in (None, "cpu"):
        found = by_name(checks.check_devices(required))
        assert {f.status for f in found.values()} == {OK}
        assert found["devices"].found == "cpu: 1 x cpu"
    for required in ("gpu", "cuda"):
        found = by_name(checks.check_devices(required))
        assert found["devices"].status == FAILED
        assert found["devices"].found.endswith(f"expected {required}")
        assert found["devices"].mend.startswith("pip install 'jax[cuda12]==")
        assert found["NVIDIA driver"].status == FAILED
        assert "docker run --gpus all" in found["NVIDIA driver"].mend


def test_a_gpu(answers):
    answers["gpus"] = [gpu()]
    memory = 16 * 2**30
    answers["devices"] = (
        {"platform": "cuda", "devices": ["NVIDIA L4"] * 2, "memory": [memory, memory]}, ""
    )  # fmt: skip
    found = by_name(checks.check_devices("gpu"))
    assert {f.status for f in found.values()} == {OK}
    assert found["devices"].found == "cuda: 2 x NVIDIA L4, 2 x 16 GiB for JAX"
    shown = "NVIDIA L4, 1 MiB of 23034 MiB used, driver 570.86.10"
    assert found["NVIDIA driver"].found == shown
    assert by_name(checks.check_devices("tpu"))["devices"].status == FAILED


def test_a_gpu_that_jax_does_not_use(answers, monkeypatch):
    answers["gpus"] = [gpu()]
    assert by_name(checks.check_devices(None))["devices"].status == WARNING
    assert by_name(checks.check_devices("cpu"))["devices"].status == OK
    found = by_name(checks.check_devices("gpu"))["devices"]
    assert (found.status, found.mend[:24]) == (FAILED, "pip install 'jax[cuda12]")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = by_name(checks.check_devices("gpu"))["devices"]
    assert "JAX_PLATFORMS is 'cpu'; unset it" in found.mend
    answers["gpus"] = [gpu("470.57.02")]
    for required, status in (("gpu", FAILED), (None, WARNING)):
        found = by_name(checks.check_devices(required))["NVIDIA driver"]
        assert (found.status, found.mend) == (status, "install a driver from 525 on, for CUDA 12")


def test_probes_that_fail(answers):
    labels = {"devices": "JAX", "body": "export and compile", "job": "run on DirectRunner"}
    for name, label in labels.items():
        before = answers[name]
        answers[name] = (None, "RuntimeError: no")
        found = by_name(checks.check_devices(None))[label]
        assert (found.status, found.found) == (FAILED, "RuntimeError: no")
        assert found.mend
        answers[name] = before


def test_nvidia_smi(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program.touch(0o700)
    for script, found in (
        ("echo 'NVIDIA L4, 23034 MiB, 1 MiB, 570.86.10'", [gpu()]),
        ("echo 'No devices were found'", None),
        ("exit 9", None),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        assert checks.nvidia_gpus() == found


# --- folders and runners


def test_folders(tmp_path, monkeypatch):
    found = checks.check_folder(str(tmp_path), "temporary folder")
    assert found.status == OK
    assert "GiB free" in found.found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(checks, "FREE_BYTES", 2**60)
    found = checks.check_folder(str(tmp_path), "temporary folder")
    assert (found.status, found.mend[:9]) == (WARNING, "make room")
    for folder in ("/proc/no-such", "nosuch://bucket/x"):
        found = checks.check_folder(folder, "work folder")
        assert found.status == FAILED
        assert found.found.startswith(f"{folder}: ")
        assert "work_folder" in found.mend


def test_runners(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:  # On a machine with everything.
        patch.setattr(checks.shutil, "which", lambda name: f"/usr/bin/{name}")
        patch.setattr(checks.importlib.util, "find_spec", lambda name: name)
        assert {f.status for f in checks.check_runners(list(checks.RUNNERS))} == {OK}
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    monkeypatch.setattr(checks.os.path, "isdir", lambda name: False)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    found = by_name(checks.check_runners(["flinkrunner"]))
    assert {name: f.status for name, f in found.items()} == {
        "PrismRunner": ABSENT, "FlinkRunner": FAILED, "SparkRunner": ABSENT,
        "DataflowRunner": ABSENT,
    }  # fmt: skip
    assert "install Java 11 or 17" in found["FlinkRunner"].mend
    assert "Maven" in found["FlinkRunner"].mend
    assert found["DataflowRunner"].mend == "pip install 'beamjax[dataflow]'"


# --- the command

FOUND = [
    Finding("Python", OK, "3.12.1"),
    Finding("jaxlib", WARNING, "0.11", "pip install jaxlib"),
    Finding("FlinkRunner", ABSENT, "can't be used from here", "install Java"),
]
MISSING = Finding("devices", FAILED, "cpu, expected gpu", "install a driver")


def test_what_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda *required: iter(FOUND))
    assert cli.main(["doctor"]) == 0
    lines = (
        "ok       Python: 3.12.1\n"
        "warning  jaxlib: 0.11\n"
        "         -> pip install jaxlib\n"
        "-        FlinkRunner: can't be used from here\n"
        "         -> install Java\n"
    )
    assert capsys.readouterr().out == lines + "\nall that is needed is there\n"
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert [Finding(**record) for record in found["findings"]] == FOUND

    monkeypatch.setattr(doctor, "examine", lambda *required: iter([*FOUND, MISSING]))
    assert cli.main(["doctor"]) == 1
    mend = "FAILED   devices: cpu, expected gpu\n         -> install a driver\n"
    assert capsys.readouterr().out == f"{lines}{mend}\n1 to mend: devices\n"
    assert cli.main(["doctor", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]


def test_arguments_are_what_is_required(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda *required: asked.append(required) or [])
    flags = ["--require-platform=gpu", "--require-runner=FlinkRunner", "--work-folder=gs://b/x"]
    cli.main(["doctor", *flags])
    assert asked == [("gpu", ["FlinkRunner"], "gs://b/x", False)]
    assert cli.main(["doctor", "--require-platform=npu"]) == 2


def test_all_is_looked_at_in_order(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "probe", lambda name: (None, "not tried"))
    names = [finding.name for finding in doctor.examine("gpu", ["PrismRunner"], str(tmp_path))]
    assert names[:2] == ["Python", "beamjax"]
    assert names[-5:] == ["work folder", *checks.RUNNERS]
    assert {"jaxlib", "JAX", "NVIDIA driver", "temporary folder"} <= set(names)


@pytest.mark.long
@pytest.mark.parametrize(("platform", "status"), [("cpu", 0), ("tpu", 1)])
def test_this_machine(platform, status):
    command = [
        sys.executable,
        "-m",
        "beamjax",
        "doctor",
        "--json",
        f"--require-platform={platform}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["run on DirectRunner"]["status"] == OK
    assert found["devices"]["status"] == (OK if platform == "cpu" else FAILED)
