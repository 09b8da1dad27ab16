"""Jars are those of the lists of hashes."""

import hashlib

import pytest

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import jars, processes

CONTENTS = {"a-1.jar": b"a", "b-1.jar": b"b"}


@pytest.fixture
def maven(monkeypatch, tmp_path):
    """Has Maven fetch files, of which there is a list."""
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jars, "SOURCES", tmp_path)
    (tmp_path / "flink.xml").touch()
    lines = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in CONTENTS.items())
    (tmp_path / "flink.sha256").write_text("".join(lines))
    monkeypatch.setattr(processes, "require", lambda tool, _: tool)

    def offer(contents):
        def run(command, *_, **__):
            folder = tmp_path / command[-1].removeprefix("-DoutputDirectory=")
            folder.mkdir()
            for name, data in contents.items():
                (folder / name).write_bytes(data)

        monkeypatch.setattr(processes, "run", run)

    return offer


@pytest.mark.parametrize(
    ("change", "named"),
    [({"a-1.jar": b"x"}, "a-1.jar"), ({"c-1.jar": b""}, "c-1.jar"), ({"b-1.jar": None}, "b-1.jar")],
)
def test_jars_that_are_others_are_refused(maven, change, named):
    contents = {name: data for name, data in {**CONTENTS, **change}.items() if data is not None}
    maven(contents)
    for _ in range(2):
        with pytest.raises(
            OptionsError, match=f"found 1 jars .* of other contents .*: {named}\\. "
        ):
            jars.classpath("flink")
    maven(CONTENTS)
    assert sorted(path.name for path in jars.classpath("flink").iterdir()) == sorted(CONTENTS)


def test_the_lists_name_each_jar_once():
    for name in ("flink", "spark"):
        lines = (jars.SOURCES / f"{name}.sha256").read_text().splitlines()
        names = [line.split()[1] for line in lines]
        assert len(set(names)) == len(names) > 100
        assert all(len(line.split()[0]) == 64 for line in lines)
