"""The command `doctor`: what it prints, and its exit status."""

import json
import subprocess
import sys

import pytest

from beamjax import doctor
from beamjax.commands import checks
from beamjax.commands.checks import ABSENT, FAILED, OK, WARNING, Finding

FOUND = [
    Finding("Python", OK, "3.12.1"),
    Finding("jaxlib", WARNING, "0.11", "pip install jaxlib"),
    Finding("FlinkRunner", ABSENT, "can't be used from here", "install Java"),
]
MISSING = Finding("devices", FAILED, "cpu, expected gpu", "install a driver")


def test_what_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda *required: iter(FOUND))
    assert doctor.main([]) == 0
    lines = (
        "ok       Python: 3.12.1\n"
        "warning  jaxlib: 0.11\n"
        "         -> pip install jaxlib\n"
        "-        FlinkRunner: can't be used from here\n"
        "         -> install Java\n"
    )
    assert capsys.readouterr().out == lines + "\nall that is needed is there\n"
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert [Finding(**record) for record in found["findings"]] == FOUND

    monkeypatch.setattr(doctor, "examine", lambda *required: iter([*FOUND, MISSING]))
    assert doctor.main([]) == 1
    mend = "FAILED   devices: cpu, expected gpu\n         -> install a driver\n"
    assert capsys.readouterr().out == f"{lines}{mend}\n1 to mend: devices\n"
    assert doctor.main(["--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]


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


@pytest.mark.long
@pytest.mark.parametrize(("platform", "status"), [("cpu", 0), ("tpu", 1)])
def test_this_machine(platform, status):
    command = [sys.executable, "-m", "beamjax.doctor", "--json", f"--require-platform={platform}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["run on DirectRunner"]["status"] == OK
    assert found["devices"]["status"] == (OK if platform == "cpu" else FAILED)
