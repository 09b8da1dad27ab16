"""Options as a user may write them, and Beam's options with views that are made once."""

import copy
import dataclasses
import math
import os
import pathlib

import pytest
import url_files  # noqa: F401  (makes bjtest:// known)
from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    PipelineOptions,
    StandardOptions,
    TypeOptions,
)

from beamjax.errors import OptionsError
from beamjax.options import OWN, Options, beam_flags, parse_options
from beamjax.pipelines.clusters.flags import QuickOptions

CPU_CUDA = Options(shard_size=64, platforms=("cpu", "cuda"))
WORKERS = "--direct_num_workers=2"
READ = [
    (None, Options()),
    ({}, Options()),
    ([], Options()),
    (Options(shard_size=16), Options(shard_size=16)),
    ({"shard_size": 64, "platforms": ["cpu", "cuda"]}, CPU_CUDA),
    (["--shard_size=64", "--platforms=cpu,cuda"], CPU_CUDA),
    (["--shard_size", "64", "--platforms", "cpu,cuda"], CPU_CUDA),
    (["--member_loop=batches", "--overwrite=true", "--shard_size=16"],
     Options(member_loop="batches", overwrite=True, shard_size=16)),
    (["--checkpoint=bjtest://b/c", "--checkpoint_every=1"],
     Options(checkpoint="bjtest://b/c", checkpoint_every=1)),
    ({"checkpoint": pathlib.Path("a/b")}, Options(checkpoint=os.path.abspath("a/b"))),
    (("--reduction=fast",), Options(reduction="fast")),
    (["--progress=true"], Options(progress=True)),
    (["--shard_timeout=2.5"], Options(shard_timeout=2.5)),
    (["--job_folder=a/b"], Options(job_folder="a/b")),
    ({"report": "file:///a%20b.html"}, Options(report="/a b.html")),
    (["--work_folder=bjtest://bucket/x=y"], Options(work_folder="bjtest://bucket/x=y")),
    (["--shard_size=8", WORKERS, "--streaming"],
     Options(shard_size=8, beam=(WORKERS, "--streaming"))),
    ({"shard_size": 8, "direct_num_workers": 2, "streaming": True, "a": False, "b": None},
     Options(shard_size=8, beam=(WORKERS, "--streaming"))),
]  # fmt: skip
REFUSED = [
    ("--shard_size=8", "options: found a str, expected a dict, a list of flags"),
    (8, "options: found a int"),
    ([8], "options: found the flag 8, expected text like '--name=x'"),
    (["--shard_size=x"], "shard_size: found 'x', expected a positive multiple of 8"),
    ({"reduction": "slow"}, "reduction: found 'slow', expected one of exact, fast"),
    (Options(reduction="slow"), "reduction: found 'slow'"),
    ({"platforms": ["cpu", "npu"]}, r"platforms: found \['cpu', 'npu'\], expected a list of"),
    (["--overwrite=maybe"], "overwrite: found 'maybe', expected one of True, False"),
    ({"checkpoint": 3}, "checkpoint: found 3, expected the path or URL of a folder"),
    (["--shard_timeout=soon"], "shard_timeout: found 'soon', expected a number of seconds"),
    ({"member_loop": "fast"}, "member_loop: found 'fast', expected one of vmap, batches, loop"),
    ({"progress": "maybe"}, "progress: found 'maybe', expected one of True, False, or None"),
    *[
        ({name: "nofs://a.html"}, f"{name}: found 'nofs://a.html', which has the scheme nofs://")
        for name in ("cache", "checkpoint", "job_folder")
    ],
    ({"dead_letters": "x"}, "dead_letters: found a file, but no members are dropped"),
    (["--local_devices=all"], "local_devices: found 'all', expected a number"),
    ({"dead_letters": "", "on_error": "drop"}, "dead_letters: found '', expected the path"),
    ({"on_error": "keep"}, "on_error: found 'keep', expected one of raise, drop"),
    ({"on_nonfinite": 3}, "on_nonfinite: found 3, expected one of keep, raise, drop"),
    ({"beam": "--streaming"}, "beam: found '--streaming', expected a list of flags"),
    (
        {"beam": PipelineOptions([]), "streaming": True},
        "found 'streaming' beside a PipelineOptions",
    ),
    ({"drop_limit": "many"}, "drop_limit: found 'many', expected a share from 0 to 1"),
]

inf, nan = math.inf, math.nan
LIMITS = {
    "checkpoint_every": ([1, 2], [0, -1, 1.0, True, None]),
    "checkpoint": (["/a"], ["", 3]),
    "drop_limit": ([0, 1, 0.5], [-0.1, 1.1, True, nan, None]),
    "gather_limit": ([0, 1, None], [-1, 1.0, True]),
    "local_devices": ([1, None], [0, 1.0, True]),
    "local_threads": ([1, None], [0, 1.0, True]),
    "shard_size": ([8, 64, None], [-8, 0, 4, 12]),
    "shard_timeout": ([0.1, 60, None], [0, -1, inf, nan, True]),
    "overwrite": ([True, False], [1, 0, None]),
    "xla_threads": ([1, 2], [0, 1.0, True, None]),
}
"""What options with a limit may be, and what they may not be."""


def test_options_are_read():
    for given, expected in READ:
        assert parse_options(given) == expected, given
    given = PipelineOptions([WORKERS])
    assert parse_options(given).beam is given
    assert parse_options({"beam": given, "shard_size": 8}) == Options(shard_size=8, beam=given)
    both = parse_options({"beam": [WORKERS], "streaming": True})
    assert both == Options(beam=(WORKERS, "--streaming"))
    found = parse_options(PipelineOptions(["--shard_size=64", "--platforms=cpu,cuda"]))
    assert dataclasses.replace(found, beam=()) == CPU_CUDA


def test_impossible_options_are_errors():
    for given, message in REFUSED:
        with pytest.raises(OptionsError, match=message):
            parse_options(given)
    for name, (accepted, refused) in LIMITS.items():
        for value in accepted:
            assert parse_options(Options(**{name: value})) == Options(**{name: value})
        for value in refused:
            with pytest.raises(OptionsError, match=f"^{name}: found {value!r}, expected "):
                parse_options(Options(**{name: value}))
    for how in ("on_error", "on_nonfinite"):
        assert parse_options({"dead_letters": "/x", how: "drop"}).dead_letters == "/x"


def test_a_plan_depends_on_what_shapes_its_bodies():
    plain = Options()
    assert hash(Options(beam=["--a"])) == hash(plain)
    assert "beam" not in OWN
    assert Options(shard_size=8).planning != plain.planning
    assert Options(platforms=("cuda",)).planning != plain.planning
    same = Options(reduction="fast", work_folder="x", beam=("--y",))
    assert same.planning == plain.planning


FLAGS = [
    [],
    [WORKERS],
    ["--direct_num_workers", "2"],
    ["--direct_running_mode", "multi_processing", "--direct_num_workers", "0"],
    ["--streaming", "--direct_num_workers", "2"],
    ["--direct_num_workers=1", "--direct_num_workers", "5"],
    ["--flink_master=[local]", "--parallelism", "3", "--runner", "FlinkRunner"],
    ["--nobodys_flag", "4", "--nobodys_other", "--nobodys_third=x=y"],
    ["--job_name", "a b", "--temp_location", "gs://bucket/x"],
    ["word", "--max_num_workers", "9"],
]


def test_flags_of_beam_are_found_as_beam_finds_them():
    for flags in FLAGS:
        found = PipelineOptions(flags).get_all_options(
            drop_default=True, retain_unknown_options=True
        )
        expected = {name: "" if value is True else str(value) for name, value in found.items()}
        mine = {name: value for name, value in beam_flags(tuple(flags)).items() if name in expected}
        assert mine == expected, flags
        parsed = parse_options([*flags, "--shard_size", "8"])
        assert parsed.shard_size == 8
        assert beam_flags(parsed.beam) == beam_flags(flags)
        assert beam_flags(PipelineOptions(flags)) == found


def test_quick_views_are_those_of_beam():
    """A run asks for them often, and Beam parses all flags for each view."""
    flags = ["--direct_num_workers=3", "--streaming", "--label=a=b"]
    ours, theirs = QuickOptions(flags), PipelineOptions(flags)
    for cls in (DirectOptions, StandardOptions, TypeOptions):
        view = ours.view_as(cls)
        assert ours.view_as(cls) is view
        assert type(view) is cls
        assert view.get_all_options() == theirs.view_as(cls).get_all_options()
    assert ours.get_all_options() == theirs.get_all_options()
    assert ours.display_data() == theirs.display_data()
    ours.view_as(StandardOptions).runner = "Some"
    assert ours.view_as(TypeOptions).view_as(StandardOptions).runner == "Some"
    assert ours.get_all_options()["runner"] == "Some"
    theirs.view_as(StandardOptions).runner = "Some"
    for drop in (True, False):
        asked = {"drop_default": drop, "retain_unknown_options": True}
        assert ours.get_all_options(**asked) == theirs.get_all_options(**asked)


def test_quick_options_share_no_values():
    flags = ["--experiments=first"]
    one, other = QuickOptions(flags), QuickOptions(flags)
    copied = copy.deepcopy(one)
    one.view_as(DebugOptions).add_experiment("second")
    assert one.get_all_options()["experiments"] == ["first", "second"]
    for each in (other, copied, QuickOptions(flags), copy.deepcopy(other)):
        assert each.view_as(DebugOptions).experiments == ["first"]
        assert each.get_all_options()["experiments"] == ["first"]
        assert each.to_runner_api() == PipelineOptions(flags).to_runner_api()
    one.view_as(StandardOptions).runner = "Some"
    again = copy.deepcopy(one)
    assert again.view_as(StandardOptions).runner == "Some"
    assert again.view_as(DebugOptions).experiments == ["first", "second"]
