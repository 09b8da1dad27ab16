"""Prism is built from Beam's source with one line changed, and Beam's own is not taken unasked.

Go is a script here that copies files; `test_clusters` has the one that is built by Go.
"""

import sys
import zipfile

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability import prism_runner
from apache_beam.version import __version__ as beam_version

import beamjax as bj
from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import prism_server
from beamjax.pipelines.runners import connect as connections

LISTENER = 'net.Listen("tcp", fmt.Sprintf(":%d", port))'
SERVER = f"func NewServer(port int) {{\n\tlis, err := {LISTENER}\n}}\n"
GO = f"""#!{sys.executable}
import json, os, shutil, sys
if sys.argv[1:3] == ["mod", "download"]:
    assert sys.argv[-1] == "{prism_server.MODULE}@v{beam_version}", sys.argv
    print("go: downloading", file=sys.stderr)
    print(json.dumps({{"Zip": os.environ["MODULE_ZIP"], "Sum": os.environ["MODULE_SUM"]}}))
else:
    assert sys.argv[1] == "build" and sys.argv[-1] == "./{prism_server.PACKAGE}", sys.argv
    assert sorted(os.listdir()) == ["go", "go.mod", "go.sum"], os.listdir()
    assert not os.path.exists("go/a_test.go")
    assert os.path.exists(os.path.dirname("{prism_server._SERVER}") + "/own_user.go")
    shutil.copy("{prism_server._SERVER}", sys.argv[sys.argv.index("-o") + 1])
"""


@pytest.fixture
def offered(monkeypatch, tmp_path):
    """Offers a source of Prism to build, with this file in it."""

    def offer(server):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "go").write_text(GO)
        (folder / "go").chmod(0o755)
        files = {"go.mod": "", "go.sum": "", "java/A.java": "", "go/a_test.go": "", "go/a.go": ""}
        if server is not None:
            files[prism_server._SERVER] = server
        with zipfile.ZipFile(tmp_path / "module.zip", "w") as archive:
            for name, text in files.items():
                archive.writestr(f"{prism_server.MODULE}@v{beam_version}/{name}", text)
        monkeypatch.setenv("MODULE_ZIP", str(tmp_path / "module.zip"))
        monkeypatch.setenv("MODULE_SUM", prism_server.SUMS[beam_version])
        monkeypatch.setenv("PATH", str(folder))

    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path / "cache"))
    return offer


def test_one_line_is_changed(offered, monkeypatch):
    offered(SERVER)
    found = prism_server.install()
    with open(found) as file:
        changed = 'listenForOwnUser(fmt.Sprintf("localhost:%d", port))'
        assert file.read() == SERVER.replace(LISTENER, changed)
    assert {path.name for path in prism_server.installed().parent.iterdir()} == {"lock", "prism"}
    monkeypatch.setenv("PATH", "")
    assert prism_server.install() == prism_server.locate() == found


def test_a_build_says_so_and_names_a_prism_on_path(offered, monkeypatch, caplog, tmp_path):
    offered(SERVER)
    own = tmp_path / "bin" / "prism"
    own.write_text("")
    own.chmod(0o755)
    found = prism_server.locate()
    assert found == str(prism_server.installed())
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"building Prism of Beam {beam_version} with Go")
    assert f"found {own} on PATH" in told
    assert "options={'prism_location': 'prism'}" in told
    assert prism_server.locate() == found
    assert len(caplog.records) == 1
    assert prism_server.locate(PipelineOptions(["--prism_location=prism"])) == str(own)
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path / "empty"))
    (tmp_path / "bin" / "go").unlink()
    with pytest.raises(OptionsError, match=rf"no Go to build it.*found {own} on PATH"):
        prism_server.locate()


@pytest.mark.parametrize(
    ("server", "times"), [(None, 0), (SERVER.replace(":%d", "%s"), 0), (SERVER * 2, 2)]
)
def test_a_source_that_is_another_one_is_refused(offered, server, times, monkeypatch):
    offered(server)
    with pytest.raises(OptionsError, match=rf"found {times} times `.*expected it once"):
        prism_server.install()
    assert [path.name for path in prism_server.installed().parent.iterdir()] == ["lock"]
    monkeypatch.delenv("MODULE_ZIP")
    with pytest.raises(OptionsError, match=r"(?s)mod download.*GOPROXY.*KeyError: 'MODULE_ZIP'"):
        prism_server.install()


def test_a_source_of_another_hash_is_refused(offered, monkeypatch):
    offered(SERVER)
    monkeypatch.setenv("MODULE_SUM", "h1:other")
    with pytest.raises(OptionsError, match=r"with the hash h1:other, expected h1:\w+.*GOPROXY"):
        prism_server.install()
    monkeypatch.setattr(prism_server, "SUMS", {})  # another version, which Go has checked
    assert prism_server.install() == str(prism_server.installed())


def test_one_that_cannot_be_had_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OptionsError, match=r"there is no Go to build it; run `beamjax prism inst"):
        bj.run(lambda x: x, 1.0, runner="PrismRunner")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(OptionsError, match=r"cannot make this folder.*BEAMJAX_CACHE"):
        bj.run(lambda x: x, 1.0, runner="PrismRunner")


def test_the_release_of_beam_is_taken_only_where_it_is_asked_for(offered, monkeypatch):
    offered(SERVER)
    asked = []
    release = lambda url, **_: asked.append(url) or "/its/prism"
    monkeypatch.setattr(prism_server.PrismJobServer, "local_bin", release)
    assert prism_server.locate() == str(prism_server.installed())
    assert not asked
    given = f"https://github.com/apache/beam/releases/tag/v{beam_version}"
    options = PipelineOptions([f"--prism_location={given}"])
    assert prism_server.locate(options) == "/its/prism"
    assert asked[0].startswith("https://github.com/apache/beam/releases/download/")


def test_pipelines_may_take_longer_than_prism_to_take_them():
    options = PipelineOptions(["--job_server_timeout=60"])
    runner = connections.make_runner("prism")
    assert isinstance(runner, prism_runner.PrismRunner)
    assert prism_runner.PrismRunner().create_job_service_handle(None, options).timeout == 60
    assert runner.create_job_service_handle(None, options).timeout is None
