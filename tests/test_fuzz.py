"""Hostile bytes for all readers; `python -m tests.fuzz` gives them many more."""

import contextlib
import pickle
import random
import tracemalloc

import pytest
from fuzz import long_run
from fuzz.mutations import mutate
from fuzz.readers import READERS, Reader, accepts, no_pickle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beamjax.arrays import decode_arrays
from beamjax.errors import ArrayFormatError

EXAMPLES = 60
BYTES = 32 * 2**20
"""Of memory, at most, for bytes of a few KiB."""


@pytest.fixture(scope="module", params=READERS)
def reader(request, tmp_path_factory):
    found = READERS[request.param]
    folder = tmp_path_factory.mktemp("fuzz")
    return found, folder, found.seeds(folder)


def read(found, data, folder):
    """Whether bytes are taken, with little memory."""
    tracemalloc.start()
    try:
        with no_pickle():
            return accepts(found, data, folder)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < BYTES


def test_right_bytes(reader):
    found, folder, seeds = reader
    taken = [accepts(found, seed, folder) for seed in seeds]
    assert taken == [b"|O" not in seed for seed in seeds]


@given(random=st.randoms(use_true_random=False), pick=st.integers(0, 1 << 16))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_almost_right_bytes(reader, random, pick):
    found, folder, seeds = reader
    read(found, mutate(seeds[pick % len(seeds)], random), folder)


@given(data=st.binary(max_size=200))
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_bytes(reader, data):
    found, folder, _ = reader
    read(found, data, folder)


# --- the long runs


def test_hostile_bytes_reach_what_is_behind_checksums():
    """Half of what the readers take or refuse got past the checksums."""
    data = READERS["checkpoint"].seeds(None)[0]
    rng = random.Random(0)
    refusals = []
    for _ in range(200):
        try:
            decode_arrays(mutate(data, rng))
        except ArrayFormatError as error:
            refusals.append(str(error))
    assert len(refusals) < 150
    assert not all("checksum" in refusal for refusal in refusals)


def _unpickles(data, _):
    with contextlib.suppress(pickle.UnpicklingError, EOFError, ValueError):
        pickle.loads(data)


def _asks_for_much(data, _):
    bytearray(2**40)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (_unpickles, "AssertionError"),
        (_asks_for_much, "MemoryError"),
        (lambda data, _: {}[data], "KeyError"),
    ],
)
def test_a_reader_that_is_wrong_is_found(read, kind, monkeypatch, tmp_path):
    monkeypatch.setitem(READERS, "wrong", Reader(lambda _: [b"{}"], read))
    report = long_run.mutations(long_run.Harness("wrong", tmp_path), 0.1, 0)
    (found,) = report["findings"]
    assert found.startswith(kind)
    assert report["executions"] > 10
    assert len(list(tmp_path.iterdir())) == 1


def test_a_long_run(tmp_path, capsys):
    flags = "--seconds 0.5 --how mutations --reader arrays --folder".split()
    assert long_run.main([*flags, str(tmp_path)]) == 0
    assert "taken, 0 findings" in capsys.readouterr().out


def test_a_process_that_dies_is_a_finding(tmp_path, capsys):
    flags = "--seconds 0.5 --how mutations --reader nothing --folder".split()
    assert long_run.main([*flags, str(tmp_path)]) == 1
    assert "the process ended with 1" in capsys.readouterr().out
