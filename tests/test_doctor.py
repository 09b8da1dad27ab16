"""The command `doctor`: what it prints, and its exit status."""

import json
import subprocess
import sys

import pytest

from beamjax import checks, doctor
from beamjax.checks import ABSENT, FAILED, OK, WARNING, Finding


@pytest.fixture
def findings(monkeypatch):
    """What is found."""
    found = [
        Finding("Python", OK, "3.12.1"),
        Finding("jaxlib", WARNING, "0.11", "pip install jaxlib"),
        Finding("FlinkRunner", ABSENT, "can't be used from here", "install Java"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda *required: iter(found))
    return found


def test_what_is_fine(findings, capsys):
    assert doctor.main([]) == 0
    assert capsys.readouterr().out == (
        "ok       Python: 3.12.1\n"
        "warning  jaxlib: 0.11\n"
        "         -> pip install jaxlib\n"
        "-        FlinkRunner: can't be used from here\n"
        "         -> install Java\n"
        "\nall that is needed is there\n"
    )


def test_what_is_missing(findings, capsys):
    findings.append(Finding("devices", FAILED, "cpu, expected gpu", "install a driver"))
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "FAILED   devices: cpu, expected gpu\n         -> install a driver\n" in shown
    assert shown.endswith("\n1 to mend: devices\n")


@pytest.mark.parametrize("ok", [True, False])
def test_json(ok, findings, capsys):
    findings += [] if ok else [Finding("devices", FAILED, "cpu", "mend")]
    assert doctor.main(["--json"]) == (0 if ok else 1)
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is ok
    assert [Finding(**record) for record in told["findings"]] == findings


def test_arguments_are_what_is_required(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda *required: asked.append(required) or [])
    flags = ["--require-platform=gpu", "--require-runner=FlinkRunner", "--work-folder=gs://b/x"]
    doctor.main(flags)
    assert asked == [("gpu", ["FlinkRunner"], "gs://b/x", False)]
    with pytest.raises(SystemExit):
        doctor.main(["--require-platform=npu"])


def test_all_is_looked_at_in_order(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "probe", lambda name: (None, "not tried"))
    names = [finding.name for finding in doctor.examine("gpu", ["PrismRunner"], str(tmp_path))]
    assert names[:2] == ["Python", "beamjax"]
    assert names[-5:] == ["work folder", *checks.RUNNERS]
    assert {"jaxlib", "JAX", "NVIDIA driver", "temporary folder"} <= set(names)


@pytest.mark.parametrize(("platform", "status"), [("cpu", 0), ("tpu", 1)])
def test_this_machine(platform, status):
    command = [sys.executable, "-m", "beamjax.doctor", "--json", f"--require-platform={platform}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["run on DirectRunner"]["status"] == OK
    assert found["devices"]["status"] == (OK if platform == "cpu" else FAILED)
