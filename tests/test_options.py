"""Options as a user may write them."""

import pathlib

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax.errors import OptionsError
from beamjax.options import OWN, Options, beam_flags, parse_options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Options()),
        ({}, Options()),
        ([], Options()),
        (Options(shard_size=16), Options(shard_size=16)),
        ({"shard_size": 64}, Options(shard_size=64)),
        (["--shard_size=64"], Options(shard_size=64)),
        (["--rounds_per_graph=4"], Options(rounds_per_graph=4)),
        (
            ["--checkpoint=gs://b/c", "--checkpoint_every=3"],
            Options(checkpoint="gs://b/c", checkpoint_every=3),
        ),
        ({"checkpoint": pathlib.Path("a/b")}, Options(checkpoint="a/b")),
        (("--reduction=fast",), Options(reduction="fast")),
        ({"platforms": ["cpu", "cuda"]}, Options(platforms=("cpu", "cuda"))),
        (["--platforms=cpu,tpu"], Options(platforms=("cpu", "tpu"))),
        (["--callbacks=false"], Options(callbacks=False)),
        ({"callbacks": False}, Options(callbacks=False)),
        (["--progress=true"], Options(progress=True)),
        (["--shard_timeout=2.5"], Options(shard_timeout=2.5)),
        ({"shard_timeout": 60}, Options(shard_timeout=60)),
        ({"job_folder": pathlib.Path("a/b")}, Options(job_folder="a/b")),
        (
            ["--job_folder=a/b", "--keep_folder=failed"],
            Options(job_folder="a/b", keep_folder="failed"),
        ),
        (["--work_folder=gs://bucket/x=y"], Options(work_folder="gs://bucket/x=y")),
        (
            ["--shard_size=8", "--direct_num_workers=2", "--streaming"],
            Options(shard_size=8, beam=("--direct_num_workers=2", "--streaming")),
        ),
        (
            {"shard_size": 8, "direct_num_workers": 2, "streaming": True, "a": False, "b": None},
            Options(shard_size=8, beam=("--direct_num_workers=2", "--streaming")),
        ),
    ],
    ids=str,
)
def test_options_are_read(given, expected):
    assert parse_options(given) == expected


def test_beams_own_options_are_handed_on():
    given = PipelineOptions(["--direct_num_workers=2"])
    assert parse_options(given).beam is given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--shard_size=8", "options: found a str, expected a dict, a list of flags"),
        (8, "options: found a int"),
        ([8], "options: found the flag 8, expected text like '--name=x'"),
        (["--shard_size=x"], "shard_size: found 'x', expected a number"),
        ({"reduction": "slow"}, "reduction: found 'slow', expected one of exact, fast"),
        (["--reduction=slow"], "reduction: found 'slow'"),
        (Options(reduction="slow"), "reduction: found 'slow'"),
        ({"platforms": ["cpu", "npu"]}, r"platforms: found \['cpu', 'npu'\], expected a list of"),
        (["--callbacks=maybe"], "callbacks: found 'maybe', expected one of True, False"),
        ({"gather_limit": -1}, "gather_limit: found -1, expected a number of bytes, or None"),
        (["--gather_limit=many"], "gather_limit: found 'many', expected a number"),
        ({"checkpoint_every": 0}, "checkpoint_every: found 0, expected a number from 1"),
        (["--checkpoint_every=x"], "checkpoint_every: found 'x', expected a number"),
        ({"checkpoint": 3}, "checkpoint: found 3, expected the path or URL of a folder"),
        ({"checkpoint": ""}, "checkpoint: found '', expected the path or URL of a folder"),
        (["--rounds_per_graph=two"], "rounds_per_graph: found 'two', expected a number"),
        ({"rounds_per_graph": 0}, "rounds_per_graph: found 0, expected a number from 1"),
        ({"rounds_per_graph": True}, "rounds_per_graph: found True"),
        (Options(rounds_per_graph=2.0), r"rounds_per_graph: found 2\.0"),
        ({"shard_timeout": 0}, "shard_timeout: found 0, expected a number of seconds above 0, or"),
        ({"shard_timeout": float("nan")}, "shard_timeout: found nan"),
        ({"shard_timeout": float("inf")}, "shard_timeout: found inf"),
        ({"shard_timeout": True}, "shard_timeout: found True"),
        (["--shard_timeout=soon"], "shard_timeout: found 'soon', expected a number"),
        ({"progress": "yes"}, "progress: found 'yes', expected one of True, False, or None"),
        (
            ["--keep_folder=never"],
            "keep_folder: found 'never', expected one of failed, always, or None",
        ),
        (["--platforms=cpu,npu"], r"platforms: found \['cpu', 'npu'\]"),
    ],
    ids=str,
)
def test_impossible_options_are_errors(given, message):
    with pytest.raises(OptionsError, match=message):
        parse_options(given)


def test_a_plan_depends_on_what_shapes_its_bodies():
    plain = Options()
    assert Options(shard_size=8).planning != plain.planning
    assert Options(platforms=("cuda",)).planning != plain.planning
    assert (
        Options(reduction="fast", work_folder="x", rounds_per_graph=2, beam=("--y",)).planning
        == plain.planning
    )


def test_options_are_hashable_whatever_beam_gets():
    assert hash(Options(beam=["--a"])) == hash(Options())
    assert set(OWN) == {
        "shard_size", "reduction", "platforms", "work_folder", "callbacks", "rounds_per_graph",
        "gather_limit", "job_folder", "overwrite", "keep_folder", "progress", "report",
        "require_platform", "device_memory_fraction", "preallocate",
        "local_devices", "local_threads", "shard_timeout", "compile_cache", "member_loop",
        "member_batch", "probe", "plan", "recompute", "merge_fan_out", "small_work",
        "checkpoint", "checkpoint_every", "on_error", "on_nonfinite", "drop_limit", "dead_letters",
        "keep", "results_folder", "memory", "xla_threads", "strict",
    }  # fmt: skip


def test_own_options_in_any_form():
    expected = Options(shard_size=64, platforms=("cpu", "cuda"))
    flags = ["--shard_size=64", "--platforms=cpu,cuda"]
    for given in (
        flags,
        ["--shard_size", "64", "--platforms", "cpu,cuda"],
        {"shard_size": 64, "platforms": ["cpu", "cuda"]},
        PipelineOptions(flags),
    ):
        found = parse_options(given)
        assert (found.shard_size, found.platforms) == (expected.shard_size, expected.platforms)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--direct_num_workers=2"],
        ["--direct_num_workers", "2"],
        ["--direct_running_mode", "multi_processing", "--direct_num_workers", "0"],
        ["--streaming", "--direct_num_workers", "2"],
        ["--direct_num_workers=1", "--direct_num_workers", "5"],
        ["--flink_master=[local]", "--parallelism", "3", "--runner", "FlinkRunner"],
        ["--nobodys_flag", "4", "--nobodys_other", "--nobodys_third=x=y"],
        ["--job_name", "a b", "--temp_location", "gs://bucket/x"],
        ["word", "--max_num_workers", "9"],
    ],
)
def test_flags_of_beam_are_found_as_beam_finds_them(flags):
    found = PipelineOptions(flags).get_all_options(drop_default=True, retain_unknown_options=True)
    expected = {name: "" if value is True else str(value) for name, value in found.items()}
    mine = {name: value for name, value in beam_flags(tuple(flags)).items() if name in expected}
    assert mine == expected
    parsed = parse_options([*flags, "--shard_size", "8"])
    assert parsed.shard_size == 8
    assert beam_flags(parsed.beam) == beam_flags(flags)
    assert beam_flags(PipelineOptions(flags)) == found
