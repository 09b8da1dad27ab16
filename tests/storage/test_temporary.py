"""Temporary folders: removed by the next run if their process is killed, and by nothing else."""

import os
import subprocess
import sys

import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import OptionsError
from beamjax.storage import temporary

MAKE = """
import os, sys
from beamjax.storage import temporary
folder = temporary.new_name(sys.argv[1])
temporary.make(folder)
open(f"{folder}/data", "w").close()
print(folder, flush=True)
sys.stdin.read()
"""


def other_process(parent):
    """A process with a folder, and the folder."""
    command = [sys.executable, "-c", MAKE, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_a_folder_is_swept_when_its_process_is_gone(tmp_path):
    process, folder = other_process(tmp_path)
    try:
        temporary.sweep(str(tmp_path))
        assert set(os.listdir(folder)) == {temporary.OWNER, "data"}
        process.kill()
        process.wait()
        temporary.sweep(str(tmp_path))
        assert os.listdir(tmp_path) == []
    finally:
        process.kill()
        process.communicate()


BOOT, HOST, MACHINE = temporary._machine()


@pytest.mark.skipif(not BOOT, reason="this system does not name its boot")
@pytest.mark.parametrize(
    ("owner", "gone"),
    [
        ((BOOT, "container", ""), True),
        (("before", HOST, MACHINE), bool(MACHINE)),
        (("before", HOST, "other"), False),
        (("before", "other", MACHINE), False),
        ((), False),
        (("one",), False),
    ],
)
def test_folders_of_other_machines_stay(owner, gone, tmp_path):
    """A network file system may not share locks."""
    folder = tmp_path / "beamjax-0"
    folder.mkdir()
    (folder / temporary.OWNER).write_text("\n".join(owner))
    temporary.sweep(str(tmp_path))
    assert folder.exists() != gone


def test_what_is_no_temporary_folder_stays(tmp_path):
    (tmp_path / "beamjax-of-the-user").mkdir()  # no owner
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / temporary.OWNER).write_text(BOOT)
    (tmp_path / "beamjax-link").symlink_to("other")
    (tmp_path / "beamjax-file").touch()
    (tmp_path / "beamjax-forged").mkdir()
    (tmp_path / "beamjax-forged" / temporary.OWNER).symlink_to("../other/.owner")
    (tmp_path / "beamjax-fifo").mkdir()
    os.mkfifo(tmp_path / "beamjax-fifo" / temporary.OWNER)
    before = sorted(os.listdir(tmp_path))
    temporary.sweep(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == before
    temporary.sweep(str(tmp_path / "none"))


def test_folders_of_this_process(tmp_path):
    folder = temporary.new_name(str(tmp_path), "word")
    assert folder.startswith(f"{tmp_path}/beamjax-word-")
    temporary.make(folder)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    temporary.sweep(str(tmp_path))
    temporary.remove_empty(folder)
    assert not os.path.exists(folder)
    temporary.make(folder)
    open(f"{folder}/data", "w").close()
    temporary.remove_empty(folder)
    assert os.path.exists(folder)
    temporary.remove(folder)
    assert not os.path.exists(folder)
    temporary.make(folder)
    temporary.release(folder)
    temporary.sweep(str(tmp_path))
    assert os.listdir(folder) == []
    assert temporary.new_name("gs://bucket/a/").startswith("gs://bucket/a/beamjax-")
    temporary.make("gs://bucket/a/beamjax-1")
    tmp_path.chmod(0o777)
    with pytest.raises(OptionsError, match="others can write to"):
        temporary.make(temporary.new_name(str(tmp_path)))


RUN = """
import sys
import jax, numpy as np
import beamjax as bj

def wait(v):
    print("computing", flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.read()
    return np.asarray(v)

kind = jax.ShapeDtypeStruct((), "float32")
body = lambda v: jax.pure_callback(wait, kind, v, vmap_method="sequential")
program = bj.program(placements={"rows": None})(lambda x: bj.map_fn(body, x))
job = bj.launch(program, np.ones(16, "f"), runner=sys.argv[1], keep="placed")
print(job.result().shape)
"""


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_killed_launcher_leaves_nothing_for_longer_than_the_next_run(runner, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", RUN, runner]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "wait"], env=environment, **pipes) as killed:
        assert killed.stdout.readline() == "computing\n"
        killed.kill()
    before = os.listdir(tmp_path)
    assert len(before) >= 2  # records of the job, and results
    done = subprocess.run(
        [*command, "go on"], env=environment, input="", stdout=subprocess.PIPE, text=True
    )
    assert "(16,)" in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_run_in_this_process_sweeps(tmp_path, monkeypatch):
    process, _ = other_process(tmp_path)
    process.kill()
    process.communicate()
    program = bj.program(placements={"rows": None})(lambda x: bj.reduce_sum(x))
    options = {"work_folder": str(tmp_path)}
    bj.run(program, np.ones(8, np.float32), runner="local", options=options)
    assert os.listdir(tmp_path) == []


def test_the_folder_of_a_pipeline_that_may_outlive_this_process_stays(tmp_path):
    code = (
        "import apache_beam as beam, numpy as np, sys, beamjax as bj\n"
        "program = bj.program(placements={'rows': None})(lambda x: bj.reduce_sum(x))\n"
        "flags = ['--direct_running_mode=multi_processing', '--direct_num_workers=2']\n"
        "pipeline = bj.pipeline('DirectRunner', flags)\n"
        "big = np.ones(1 << 20, 'f')\n"
        "pipeline | bj.transform(program, big, options={'work_folder': sys.argv[1]})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    before = os.listdir(tmp_path)
    assert len(before) == 1
    temporary.sweep(str(tmp_path))
    assert os.listdir(tmp_path) == before
