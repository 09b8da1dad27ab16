"""The script of `beamjax completion`, run by the shell that it is for."""

import shutil
import subprocess
import sys

import pytest

from beamjax import cli
from beamjax.commands import completion


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A file by shell."""
    folder, found = tmp_path_factory.mktemp("completion"), {}
    for shell in completion.SHELLS:
        found[shell] = folder / shell
        with pytest.MonkeyPatch.context() as patch:
            lines = []
            patch.setattr("builtins.print", lambda text, lines=lines: lines.append(text))
            assert cli.main(["completion", shell]) == 0
        found[shell].write_text("\n".join(lines), encoding="utf-8")
    return found


def completed(script, *words):
    """What bash offers for the last of the words of a command line."""
    code = f"""
        source {script}
        name=$(complete -p beamjax | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${{#COMP_LINE}}
        compopt() {{ :; }}
        $name beamjax "${{@: -1}}" "${{@: -2:1}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", code, "bash", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_flags_and_values(scripts, tmp_path, monkeypatch):
    script = scripts["bash"]
    assert completed(script, "beamjax", "") >= set(cli.COMMANDS)
    assert completed(script, "beamjax", "ex") == {"explain"}
    assert completed(script, "beamjax", "run", "--shard") >= {"--shard_size", "--shard_timeout"}
    assert completed(script, "beamjax", "run", "--runner", "") >= {"local", "FlinkRunner"}
    assert completed(script, "beamjax", "run", "--runner", "Pri") == {"PrismRunner"}
    assert completed(script, "beamjax", "run", "--on_error", "") == {"raise", "drop"}
    assert completed(script, "beamjax", "run", "--keep_folder", "") == {"failed", "always"}
    assert completed(script, "beamjax", "jobs", "") >= {"list", "show", "cancel", "resume"}
    assert completed(script, "beamjax", "completion", "z") == {"zsh"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinics.py").touch()
    assert "clinics.py" in completed(script, "beamjax", "run", "clin")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts_name_all_commands_and_the_shell_can_read_them(shell, scripts):
    text = scripts[shell].read_text("utf-8")
    assert all(name in text for name in cli.COMMANDS)
    assert "shard-size" not in text  # the spelling with dashes is not offered twice
    if shutil.which(shell):
        subprocess.run([shell, "-n", scripts[shell]], check=True)


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'beamjax[completion]'" in capsys.readouterr().err
