"""Some of the members of a source: the ones that were asked for, and no others are read."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources import taken_source
from beamjax.sources.array_source import ArraySource
from beamjax.sources.source_base import open_spec

N = 40
TREE = {"x": np.arange(N * 2, dtype=np.float32).reshape(N, 2), "y": np.arange(N, dtype=np.int16)}
KEY = jax.random.key(7)


class Watched(ArraySource, kind="watched"):
    """Remembers what is read."""

    ranges = ()

    def read(self, start, stop):
        self.ranges = (*self.ranges, (start, stop))
        return super().read(start, stop)


def watched():
    source = bj.from_arrays(TREE)
    source.__class__ = Watched
    return source


@hypothesis.given(
    st.sets(st.integers(0, N - 1), min_size=1), st.integers(0, 50), st.integers(0, N), st.data()
)
def test_ranges(members, gap, start, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken_source, "GAP_BYTES", gap)
        source = bj.take(TREE, data.draw(st.permutations(sorted(members))))
        assert source.indices.tolist() == sorted(members)
        start = min(start, len(source))
        stop = data.draw(st.integers(start, len(source)))
        for array, leaf in zip(source.read(start, stop), TREE.values(), strict=True):
            expected = leaf[sorted(members)[start:stop]]
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)


def test_only_these_are_read_and_what_lies_between(monkeypatch):
    source = watched()
    monkeypatch.setattr(taken_source, "GAP_BYTES", 0)
    bj.take(source, [3, 4, 9, 20]).read(0, 4)
    assert source.ranges == ((3, 5), (9, 10), (20, 21))
    source = watched()
    monkeypatch.setattr(taken_source, "GAP_BYTES", 4 * 10)  # four members of ten bytes
    bj.take(source, [3, 4, 9, 20]).read(1, 4)
    assert source.ranges == ((4, 10), (20, 21))


def test_a_sample_is_of_distinct_members_all_equally_likely():
    counts = np.zeros(N)
    for number in range(400):
        drawn = bj.sample(TREE, 10, jax.random.fold_in(KEY, number)).indices
        assert len(set(drawn.tolist())) == 10
        counts[drawn] += 1
    expected = 400 * 10 / N
    assert ((counts - expected) ** 2 / expected).sum() < 80  # chi squared, 39 degrees: 1 in 10,000


def test_the_same_key_draws_the_same_from_any_number_of_members():
    first = bj.sample(TREE, 5, KEY).indices
    np.testing.assert_array_equal(first, bj.sample(TREE, 5, KEY).indices)
    np.testing.assert_array_equal(first, bj.sample(TREE, 5, jax.random.key_data(KEY)).indices)
    assert bj.sample(TREE, N, KEY).indices.tolist() == list(range(N))


def test_a_sample_of_very_many_takes_no_memory():
    class Many(ArraySource):
        def __len__(self):
            return 10**12

    source = bj.from_arrays(np.zeros(1))
    source.__class__ = Many
    drawn = bj.sample(source, 1000, KEY).indices
    assert len(np.unique(drawn)) == 1000
    assert drawn.max() > 10**11


@bj.program(clients=None)
def total(key, members, indices):
    def body(member, index):
        noise = jax.random.uniform(jax.random.fold_in(key, index))
        return member["x"] * member["y"].astype(jnp.float32) + noise

    return bj.reduce_sum(bj.map_fn(body, (members, indices)))


@pytest.mark.parametrize(
    "options", [{}, {"direct_running_mode": "multi_processing", "direct_num_workers": 2}]
)
def test_a_cohort_gives_the_same_on_every_runner(options):
    cohort = bj.sample(TREE, 12, KEY)
    indices = cohort.indices.astype(np.int32)
    local = bj.run(total, KEY, cohort, indices, runner="local", options={"shard_size": 8})
    found = bj.run(total, KEY, cohort, indices, options={"shard_size": 8, **options})
    assert np.asarray(found).tobytes() == np.asarray(local).tobytes()
    members = {name: array[cohort.indices] for name, array in TREE.items()}
    np.testing.assert_allclose(found, jax.jit(total)(KEY, members, indices), rtol=1e-6)


def test_of_ragged_members():
    lengths = np.arange(20) % 13
    rows = np.arange(lengths.sum(), dtype=np.float32)
    source = bj.from_ragged(rows, lengths, buckets=[4, 8, 12])
    taken = bj.take(source, [1, 3, 17, 12])
    assert taken.buckets == (4, 8, 12)
    mask, found = taken.read_short(0, 2)
    assert found.shape == (2, 4)
    assert mask.sum(axis=1).tolist() == [1, 3]
    whole = source.read(0, 20)[1]
    np.testing.assert_array_equal(taken.read(0, 4)[1], whole[[1, 3, 12, 17]])

    @bj.program(clients=None)
    def sums(clients):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"]), clients))

    for runner in ("local", "DirectRunner"):
        assert bj.run(sums, taken, runner=runner) == whole[[1, 3, 12, 17]].sum()


def test_other_processes_open_it(tmp_path):
    source = bj.take(TREE, [5, 2]).spilled(str(tmp_path))
    again = open_spec(source.to_spec())
    for left, right in zip(again.read(0, 2), TREE.values(), strict=True):
        np.testing.assert_array_equal(left, right[[2, 5]])
    spec = source.to_spec()
    with pytest.raises(SourceError, match="expected one leaf int64"):
        open_spec({**spec, "numbers": spec["source"]})


ATTEMPTS = {
    "floats": (lambda: bj.take(TREE, [1.0]), StructureError, "found float64"),
    "nobody": (lambda: bj.take(TREE, np.zeros(0, int)), PlacementError, "found none"),
    "below": (lambda: bj.take(TREE, [-1]), PlacementError, "from 0 to 39"),
    "above": (lambda: bj.take(TREE, [3, N]), PlacementError, "found 3 to 40"),
    "twice": (lambda: bj.take(TREE, [3, 4, 3]), PlacementError, "found 3 twice"),
    "too many": (lambda: bj.sample(TREE, N + 1, KEY), PlacementError, "found 41"),
    "too few": (lambda: bj.sample(TREE, 0, KEY), PlacementError, "found 0"),
    "a share": (lambda: bj.sample(TREE, 0.5, KEY), PlacementError, r"found 0\.5"),
    "keys": (lambda: bj.sample(TREE, 2, jax.random.split(KEY)), StructureError, "one key"),
    "a seed": (lambda: bj.sample(TREE, 2, 3), StructureError, "found 3"),
    "a stream": (
        lambda: bj.sample(bj.from_chunks(lambda: [TREE]), 2, KEY), SourceError, "known length",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
def test_bad_input(name):
    attempt, kind, message = ATTEMPTS[name]
    with pytest.raises(kind, match=message):
        attempt()
