"""Hostile bytes for all readers: they refuse them with an error of beamjax, and little memory."""

import pickle
import random
import tracemalloc

import pytest
from fuzz.mutations import mutate
from fuzz.readers import READERS, Reader, accepts, no_pickle
from helpers import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beamjax.errors import ArrayFormatError
from beamjax.storage.arrays import decode_arrays

EXAMPLES = settings(
    examples(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
BYTES = 32 * 2**20
"""Of memory, at most, for bytes of a few KiB."""


@pytest.fixture(scope="module", params=READERS)
def reader(request, tmp_path_factory):
    found = READERS[request.param]
    folder = tmp_path_factory.mktemp("fuzz")
    return found, folder, found.seeds(folder)


def read(found, data, folder):
    """Reads bytes with little memory; whether they are taken."""
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
@EXAMPLES
def test_almost_right_bytes(reader, random, pick):
    found, folder, seeds = reader
    read(found, mutate(seeds[pick % len(seeds)], random), folder)


@given(data=st.binary(max_size=200))
@EXAMPLES
def test_any_bytes(reader, data):
    found, folder, _ = reader
    read(found, data, folder)


@pytest.mark.long
def test_very_many_bytes(reader):
    found, folder, seeds = reader
    rng = random.Random(0)
    with no_pickle():
        for _ in range(1000):
            accepts(found, mutate(rng.choice(seeds), rng), folder)


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


def test_these_tests_can_fail():

    for wrong, error in [
        (lambda data, _: pickle.loads(data), AssertionError),
        (lambda data, _: bytearray(BYTES), AssertionError),
        (lambda data, _: {}[data], KeyError),
    ]:
        with pytest.raises(error):
            read(Reader(lambda _: [b"{}"], wrong), pickle.dumps(3), None)
