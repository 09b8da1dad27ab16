"""The blocks that are kept: the last of each reader, and those that are read again and again."""

import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import numpy as np
from hypothesis import strategies as st

from beamjax.storage.shared_cache import LASTING_READS, BlockCache, nbytes

SIZE = 10
BLOCK_BYTES = nbytes([np.zeros(SIZE, np.uint8)])


def read(cache, key, log, reader="x"):
    def load():
        log.append(key)
        return [np.full(SIZE, 1, np.uint8)]

    return cache.get(key, load, reader)


def held(cache):
    values = [*cache.passing._values.values(), *cache.lasting._values.values()]
    return sum(nbytes(entry.value) for entry in values)


def test_passes_over_many_blocks_keep_a_few():
    cache, log = BlockCache(), []
    cache.passing.limit = 3 * BLOCK_BYTES
    for _ in range(2):
        for key in range(100):
            read(cache, key, log)
            assert held(cache) <= 3 * BLOCK_BYTES
    assert log == [*range(100)] * 2


def test_blocks_of_rounds_stay():
    cache, log = BlockCache(), []
    cache.passing.limit = 3 * BLOCK_BYTES
    for _ in range(10):
        for key in range(100):
            read(cache, key, log)
    assert log == [*range(100)] * LASTING_READS
    cache.clear()
    assert not held(cache)


def test_the_last_block_of_each_thread_stays_whatever_the_limit():
    cache, log, together = BlockCache(), [], threading.Barrier(4)
    cache.set_limit(0)

    def reads(number):
        together.wait()
        for shard in range(50):
            read(cache, (number, shard // 10), log)
            together.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(reads, range(4)))
    assert sorted(log) == [(number, block) for number in range(4) for block in range(5)]


def test_a_thread_reads_several_sources_side_by_side():
    cache, log = BlockCache(), []
    cache.set_limit(0)
    for shard in range(50):
        for reader in "ab":
            read(cache, (reader, shard // 10), log, reader)
    assert sorted(log) == [(reader, block) for reader in "ab" for block in range(5)]


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=200), st.integers(0, 200)
)
def test_no_more_is_held_than_the_limit_and_the_last_ones(reads, limit):
    cache, log = BlockCache(), []
    cache.set_limit(limit)
    for key, reader in reads:
        assert len(read(cache, (key, reader), log, reader)[0]) == SIZE
        # In each of the two parts of the cache every reader may have a last block.
        assert held(cache) <= max(limit // 2, 3 * BLOCK_BYTES) * 2
