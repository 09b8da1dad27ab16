"""A cache that threads share: each value is made once, and no more is kept than its limit."""

import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from beamjax.storage.shared_cache import SharedCache, nbytes


def made(cache, key, size=10):
    return cache.get(key, lambda: [np.full(size, key, np.uint8)])


def weight(arrays):
    return sum(array.nbytes for array in arrays)


class Key:
    """A key that counts how often it is looked up."""

    looks = 0

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        Key.looks += 1
        return hash(self.number)

    def __eq__(self, other):
        return self.number == other.number


def test_a_full_cache_of_many_small_values_looks_at_few_of_them():
    cache = SharedCache(10 * 2_000, weight)

    def fill(first, count):
        for number in range(first, first + count):
            cache.get(Key(number), lambda: [np.zeros(10, np.uint8)])

    fill(0, 2_000)
    before = Key.looks
    fill(2_000, 100)
    assert Key.looks - before < 100 * 20


def test_what_belongs_to_small_values_counts():
    def fill(cache):
        for number in range(4_000):
            cache.get(("a file", number), lambda: [np.zeros(4), np.zeros(4)])

    cache = SharedCache(1 << 20, nbytes)
    tracemalloc.start()
    fill(cache)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1.1 * cache.limit


def test_those_who_wait_get_what_the_limit_does_not_keep():
    cache, count, waiting = SharedCache(0, nbytes), [], threading.Event()
    asking = threading.Semaphore(0)

    def load():
        count.append(1)
        waiting.wait(5)
        return [np.zeros(1)]

    def ask():
        asking.release()
        return cache.get("x", load)

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask) for _ in range(4)]
        assert all(asking.acquire(timeout=5) for _ in asked)
        time.sleep(0.1)  # until they wait
        waiting.set()
        made(cache, 1)  # pushes x out, whether before the others got it or after
        assert all(one.result()[0][0] == 0 for one in asked)
    assert len(count) == 1


def test_the_last_used_stay_within_the_limit():
    cache = SharedCache(30, weight)
    first, second = made(cache, 1), made(cache, 2)
    made(cache, 3)
    assert made(cache, 1) is first
    made(cache, 4)
    assert made(cache, 1) is first
    assert made(cache, 2) is not second
    big = made(cache, 9, 1000)
    assert made(cache, 9) is big
    assert made(cache, 1) is not first
    cache.clear()
    assert made(cache, 9) is not big


def test_what_fails_is_tried_again_by_the_next():
    cache, errors = SharedCache(100, weight), [OSError("first")]

    def load():
        if errors:
            raise errors.pop()
        return [np.zeros(1)]

    with pytest.raises(OSError, match="first"):
        cache.get("x", load)
    assert len(cache.get("x", load)) == 1
    assert not cache._loads._flights


def test_keys_are_loaded_at_the_same_time():
    cache, both = SharedCache(100, weight), threading.Barrier(2, timeout=30)

    def load(size):
        both.wait()  # fails unless the other one is loading, too
        return [np.zeros(size, np.uint8)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda key: cache.get(key, lambda: load(key)), (1, 2)))
    assert [value[0].size for value in found] == [1, 2]


def test_an_owner_takes_only_its_own_values_along():
    cache = SharedCache(1000, weight)

    def ask(key, *owners):
        for owner in owners:
            value = cache.get(key, lambda: [np.zeros(key, np.uint8)], owner=owner)
        return value

    cache.open("a")
    cache.open("b")
    values = {1: ask(1, "a"), 2: ask(2, "a", "b"), 3: ask(3, "b"), 4: ask(4, None), 5: ask(5, "x")}
    cache.close("a")
    stays = {key for key, value in values.items() if ask(key, None) is value}
    assert stays == {2, 3, 4, 5}
    cache.close("b")
    stays = {key for key, value in values.items() if ask(key, None) is value}
    assert stays == {4, 5}  # of those that nobody closes, the limit gets rid
    assert not cache._owners
