# ruff: noqa: F811
"""Wrong command lines, and options that go to beamjax or Beam."""

import json

import pytest
from command_lines import LOSS, folder  # noqa: F401 (a fixture)

from beamjax import cli
from beamjax.commands import flags
from beamjax.errors import OptionsError
from beamjax.options import OWN, beam_flags

HERE = "programs_here.py:"


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "the following arguments are required: COMMAND"),
        (["rnu"], 2, "found no command 'rnu'; did you mean 'run'?"),
        (["run"], 2, "the following arguments are required: TARGET"),
        (["jobs"], 2, "the following arguments are required: list|show|cancel|resume"),
        (["jobs", "lst"], 2, "invalid choice: 'lst'"),
        (["jobs", "show"], 2, "the following arguments are required: JOB"),
        (["jobs", "list", "--jsn"], 2, "unrecognized arguments: --jsn"),
        (["run", *LOSS, "--arg"], 2, "argument --arg: expected one argument"),
        (["run", *LOSS, "--runner", "DirctRunner"], 2, "found 'DirctRunner', expected 'local'"),
        (["run", *LOSS, "--shard_sise=8"], 2, "did you mean --shard_size?"),
        (["run", *LOSS, "--runner=local", "--sharde-size=8"], 2, "did you mean --shard_size?"),
        (["run", *LOSS, "--direct_num_worker=2"], 2, "did you mean --direct_num_workers?"),
        (["run", *LOSS, "--otu=x.npz"], 2, "did you mean --out?"),
        (["run", *LOSS, "--direct_num_workers=x"], 2, "Beam does not take these flags"),
        (["run", *LOSS, "--qqqqq=8"], 2, "which is no option of beamjax, nor one of Beam\n"),
        (["run", *LOSS, "--shard_size=x"], 2, "shard_size: found 'x', expected a number"),
        (["run", *LOSS, "--shard_size=3"], 2, "shard_size: found 3"),
        (["run", *LOSS, "--reduction=slow"], 2, "reduction: found 'slow', expected one of exact"),
        (["run", *LOSS, "w.npz"], 2, "found 'w.npz', which belongs to no flag"),
        (["run", *LOSS, "--out=x.txt"], 2, "expected a name that ends in .npz, or in .npy"),
        (["run", *LOSS, "--out=there/x.npz"], 2, "there is no folder"),
        (["run", *LOSS, "--out=x.npz", "--keep=placed"], 2, "with --keep placed it is a folder"),
        (["run", *LOSS, "--out=x.npy", "--runner=local"], 2, "found 2 leaves, expected one"),
        (["run", *LOSS, "--results_folder=x"], 2, "add keep='placed'"),
        (["run", f"{HERE}los"], 2, "did you mean 'loss'?"),
        (["run", "--direct_num_workers", "2", *LOSS], 2, "found '2' as TARGET, which comes before"),
        (["verify", *LOSS, "--rtol=x"], 2, "argument --rtol: invalid float value: 'x'"),
        (["verify", *LOSS, "--rtol=-1"], 2, "rtol: found -1.0, expected a number >= 0"),
        (["verify", *LOSS, "--out=x.npz"], 2, "found --out, which is no option"),
        (["explain", *LOSS, "--stage=plna"], 2, "expected one of staged, flat, placed, graph"),
        (["explain", *LOSS, "--stage=flat", "--mermaid"], 2, "expected stage 'plan'"),
        (["explain", *LOSS, "--html=there/x.html"], 2, "--html there/x.html: cannot write it"),
        (["bench", *LOSS, "--repeat=0"], 2, "argument --repeat: found 0, expected a number from 1"),
        (["bench", *LOSS, "--checkpoint=c"], 2, "found a folder of a job or of checkpoints"),
        (["jobs", "show", "none"], 2, "found no job; expected a folder that was given as"),
        (["jobs", "list", "none"], 2, "none: found no such folder"),
        (["jobs", "list", "gs://bucket/jobs"], 2, "folders at URLs can't be listed"),
        (["run", f"{HERE}broken", "--arg=x=1"], 1, "KeyError: 'nobody'"),
        (["run", f"{HERE}embed", "--arg=w=1", "--arg=x=w.npz"], 1, "beamjax: "),
        (["run", *LOSS[:-1], "y=range:3"], 1, "beamjax: "),
    ],
)
def test_what_is_wrong(folder, argv, status, message, capsys):
    assert cli.main(argv) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
    assert "beamjax/commands" not in captured.err


@pytest.mark.parametrize("command", ["run", "verify", "explain", "bench"])
def test_errors_as_json(folder, command, capsys):
    assert cli.main([command, f"{HERE}broken", "--arg=x=1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["error"]["type"] == "KeyError"
    assert cli.main([command, f"{HERE}loss", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["error"]["type"] == "OptionsError"
    assert "add --arg weights=... --arg x=... --arg y=..." in found["error"]["message"]


@pytest.mark.parametrize("command", ["run", "verify", "explain", "bench"])
def test_help_tells_of_everything(command, capsys):
    assert cli.main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"--{name}" in told for name in OWN)
    assert "exit codes: 0 done; 1 a run failed" in told
    assert "TARGET" in told
    assert "key:0" in told
    of_a_few = {"reduction": "exact,fast", "on_error": "raise,drop", "probe": "true,false"}
    of_a_few |= {"on_nonfinite": "keep,raise,drop", "member_loop": "vmap,batches,loop"}
    assert [name for name, them in of_a_few.items() if f"--{name} {{{them}}}" not in told] == []


def test_the_words_of_options_are_those_of_their_documentation():
    found = flags.option_help()
    assert set(found) == set(OWN)
    assert all(found.values())
    assert found["shard_size"].startswith("members in a shard, a multiple of 8")
    assert max(map(len, found.values())) < 400


def parsed(*argv, after=()):
    import argparse

    parser = argparse.ArgumentParser()
    flags.add_call(parser)
    arguments, left = parser.parse_known_args(["m:f", *argv])
    arguments.flags, arguments.beam_flags = left, list(after)
    return flags.options_of(arguments)


def test_options_with_underscores_or_dashes_and_those_of_beam():
    found = parsed("--shard-size", "64", "--callbacks=false", "--direct_num_workers", "2")
    assert (found.shard_size, found.callbacks) == (64, False)
    assert found.beam == ("--direct_num_workers", "2")
    found = parsed("--shard-size", "64", "--direct_num_workers", "2", after=["--beam_only=1"])
    assert found.shard_size == 64
    assert beam_flags(found.beam) == {"direct_num_workers": 2, "beam_only": "1"}


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--direct_num_workers", "2"],
        ["--direct_num_workers=2", "--streaming"],
        ["--experiments=a", "--experiments", "b"],
        ["--flink_cluster=folder"],
    ],
)
def test_flags_of_beam(given):
    flags.check_flags(given, "local")
    flags.check_flags(given, "FlinkRunner")


def test_a_server_may_know_flags_that_nobody_here_does(capsys):
    flags.check_flags(["--qqqqq", "3", "--zzzzz=4"], "FlinkRunner")
    told = capsys.readouterr().err
    assert "--qqqqq is handed to FlinkRunner as it is" in told
    assert "--zzzzz is handed to" in told
    with pytest.raises(OptionsError, match="did you mean --parallelism"):
        flags.check_flags(["--paralelism=3"], "FlinkRunner")
    with pytest.raises(OptionsError, match="found '3', which belongs to no flag"):
        flags.check_flags(["--zzzzz=4", "3"], "FlinkRunner")


def test_what_comes_after_two_dashes_is_not_looked_at(folder, capsys):
    assert cli.main(["run", *LOSS, "--runner=local", "--", "--shard_sise=9"]) == 0
