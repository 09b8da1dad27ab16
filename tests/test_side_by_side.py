"""Parts of long vectors on several threads."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax import side_by_side
from beamjax.side_by_side import LONG, in_parts


@given(st.integers(0, 40), st.sampled_from([1, LONG]), st.integers(1, 6))
def test_every_part_is_worked_on_once(count, values, threads):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "_threads", lambda: threads)
        in_parts(count, values, lambda first, last: seen.extend(range(first, last)))
    assert sorted(seen) == list(range(count))


def test_long_vectors_are_on_several_threads(monkeypatch):
    monkeypatch.setattr(side_by_side, "_threads", lambda: 2)
    together = threading.Barrier(2, timeout=60)
    in_parts(2, LONG, lambda first, last: together.wait())


def test_short_ones_stay_on_this_thread(monkeypatch):
    monkeypatch.setattr(side_by_side, "_threads", lambda: 2)
    seen = []
    in_parts(2, LONG - 1, lambda first, last: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]


@pytest.mark.parametrize("bad", [0, 3])
def test_errors_of_any_thread_are_raised(monkeypatch, bad):
    monkeypatch.setattr(side_by_side, "_threads", lambda: 4)
    done = []

    def work(first, last):
        if first == bad:
            raise ValueError(f"part {first}")
        done.append(first)

    with pytest.raises(ValueError, match=f"part {bad}"):
        in_parts(4, LONG, work)
    assert sorted([*done, bad]) == [0, 1, 2, 3]
