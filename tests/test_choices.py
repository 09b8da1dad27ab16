"""What a plan is fixed to, as data and as options."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.choices import Choices, Looping, Trial, read_choices, write_json
from beamjax.errors import OptionsError
from beamjax.options import Options, parse_options

NAMES = st.text(min_size=1, max_size=8)
SIZES = st.integers(1, 512).map(lambda n: 8 * n)
LOOPINGS = st.one_of(
    st.sampled_from([Looping("vmap"), Looping("loop")]),
    SIZES.map(lambda n: Looping("batches", n)),
)
TRIALS = st.builds(Trial, NAMES, SIZES, LOOPINGS, st.floats(0, 1e6))
CHOICES = st.builds(
    Choices,
    st.dictionaries(NAMES, SIZES),
    st.dictionaries(NAMES, LOOPINGS),
    st.sampled_from(["rule", "probe"]),
    st.text(),
    st.lists(TRIALS).map(tuple),
    st.text(),
)
SOME = Choices({"clients": 16}, {"map_clients_0": Looping("batches", 8)}, "probe", "why")


@given(CHOICES)
def test_choices_survive_json(choices):
    again = Choices.from_json(json.loads(json.dumps(choices.to_json())))
    assert again == choices
    assert hash(again) == hash(choices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "found format 99, expected 1"),
        ({"shard_sizes": {"clients": 12}}, "multiple of 8"),
        ({"shard_sizes": {"clients": True}}, "multiple of 8"),
        ({"shard_sizes": None}, "found None as 'shard_sizes', expected a dict"),
        ({"passes": {"a": {"member_loop": "fast", "batch": 0}}}, "found member_loop 'fast'"),
        ({"passes": {"a": {"member_loop": "loop", "batch": 8}}}, "expected 0 without batches"),
        ({"passes": {"a": {"member_loop": "batches", "batch": 4}}}, "multiple of 8"),
        ({"passes": {"a": 3}}, "found member_loop None"),
        ({"tried": [3]}, "'shard_size'"),
        ({"tried": [{"shard_size": 8, "seconds": "1"}]}, "as seconds"),
    ],
    ids=str,
)
def test_what_are_no_choices(change, message, tmp_path):
    path = tmp_path / "plan.json"
    write_json(path, SOME.to_json() | change)
    with pytest.raises(OptionsError, match=message) as raised:
        read_choices(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_files_of_something_else(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(OptionsError, match=r"expected a file that beamjax\.explain"):
        parse_options({"plan": path})


def test_a_missing_file(tmp_path):
    with pytest.raises(OptionsError, match=r"plan: cannot read .*nothing\.json"):
        parse_options({"plan": tmp_path / "nothing.json"})


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(TypeError):
        write_json(path, object())
    assert list(tmp_path.iterdir()) == []


def test_the_option_plan_is_read_once(tmp_path):
    path = tmp_path / "plan.json"
    write_json(path, SOME.to_json())
    for given_ in ({"plan": path}, {"plan": str(path)}, [f"--plan={path}"]):
        options = parse_options(given_)
        assert options.plan == SOME
    path.unlink()
    assert parse_options(options).plan == SOME


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"member_loop": "loop"}, Options(member_loop="loop")),
        (
            ["--member_loop=batches", "--member_batch=16"],
            Options(member_loop="batches", member_batch=16),
        ),
        (["--probe=true"], Options(probe=True)),
        ({"probe": False}, Options(probe=False)),
        (["--merge_fan_out=4"], Options(merge_fan_out=4)),
        ({"small_work": "here"}, Options(small_work="here")),
    ],
    ids=str,
)
def test_options_that_fix_choices(given_, expected):
    assert parse_options(given_) == expected


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"member_loop": "fast"}, "member_loop: found 'fast', expected one of vmap, batches, loop"),
        ({"member_batch": 8}, "add member_loop='batches'"),
        ({"member_loop": "loop", "member_batch": 8}, "members don't come in batches"),
        ({"member_loop": "batches", "member_batch": 12}, "found 12, expected a positive multiple"),
        (
            {"member_loop": "batches", "member_batch": 16, "shard_size": 24},
            "found 16 with shard_size=24",
        ),
        ({"probe": "maybe"}, "probe: found 'maybe', expected one of True, False, or None"),
        ({"merge_fan_out": 0}, "merge_fan_out: found 0, expected a number from 1"),
        ({"recompute": "all"}, "recompute: found 'all', expected one of elementwise, nothing"),
        ({"small_work": "there"}, "small_work: found 'there', expected one of runner, here"),
        ({"plan": 3}, "plan: found 3, expected the path of a file"),
    ],
    ids=str,
)
def test_options_that_cannot_be(given_, message):
    with pytest.raises(OptionsError, match=message):
        parse_options(given_)


def test_a_path_of_any_kind_is_one():
    with pytest.raises(OptionsError, match="cannot read"):
        parse_options({"plan": pathlib.Path("no/such/file")})
