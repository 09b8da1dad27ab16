"""Two tables joined by a column: as a dict would join them, whoever reads which rows."""

import os

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import beamjax as bj
from beamjax import joining, table_parts
from beamjax.errors import OptionsError, SourceError, StructureError

N = 400
RNG = np.random.default_rng(2)
IDS = RNG.permutation(5 * N)[:N].astype(np.int64) - N
LEFT = {"id": IDS, "x": RNG.normal(size=(N, 2)).astype(np.float32)}
ORDER = RNG.permutation(N)
RIGHT = {"id": IDS[ORDER], "y": np.arange(N, dtype=np.int16)}
RUNNERS = {
    "local": {},
    "one": {"runner": "DirectRunner"},
    "processes": {
        "runner": "DirectRunner",
        "options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
    },
}


@pytest.fixture
def small(monkeypatch):
    """Many parts and blocks for small tables."""
    monkeypatch.setattr(table_parts, "PART_BYTES", 1000)
    monkeypatch.setattr(joining, "BLOCK_BYTES", 700)


def assert_joined(joined, left, right, on):
    found = jax.tree_util.tree_unflatten(joined.treedef, joined.read(0, len(joined)))
    both = set(left[on].tolist()) & set(right[on].tolist())
    assert sorted(found[on].tolist()) == sorted(both)
    for table in (left, right):
        rows = {key: row for row, key in enumerate(table[on].tolist())}
        order = [rows[key] for key in found[on].tolist()]
        for name, array in table.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array[order])


@pytest.mark.parametrize("how", RUNNERS)
def test_rows_meet(how, tmp_path, small):
    joined = bj.join(LEFT, RIGHT, "id", folder=tmp_path / how, **RUNNERS[how])
    assert len(joined) == N
    assert joined.unmatched == (0, 0)
    assert_joined(joined, LEFT, RIGHT, "id")
    bj.join(LEFT, RIGHT, "id", folder=tmp_path / "local")
    for name in os.listdir(tmp_path / "local"):
        assert (tmp_path / how / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


@hypothesis.given(
    st.sets(st.integers(-20, 20), min_size=1), st.sets(st.integers(-20, 20), min_size=1), st.data()
)
@hypothesis.settings(max_examples=40)
def test_inner_joins_of_any_keys(tmp_path_factory, left, right, data):
    tables = [
        {"k": np.array(data.draw(st.permutations(sorted(keys))), np.int32), name: np.arange(n)}
        for name, keys, n in (("a", left, len(left)), ("b", right, len(right)))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_parts, "PART_BYTES", 100)
        folder = tmp_path_factory.mktemp("j")
        if not left & right:
            with pytest.raises(SourceError, match="no key of 'k' that is in both"):
                bj.join(*tables, "k", folder=folder, how="inner")
            return
        joined = bj.join(*tables, "k", folder=folder, how="inner")
    assert joined.unmatched == (len(left - right), len(right - left))
    assert_joined(joined, *tables, "k")


def test_a_program_over_the_rows(tmp_path, small):
    joined = bj.join(LEFT, RIGHT, "id", folder=tmp_path)

    @bj.program(rows=None)
    def total(rows):
        return bj.reduce_sum(bj.map_fn(lambda r: r["x"] * r["y"].astype("float32"), rows))

    y = np.empty(N, np.int16)
    y[ORDER] = RIGHT["y"]
    expected = (LEFT["x"] * y[:, None].astype(np.float64)).sum(axis=0)
    for runner in ("local", "DirectRunner"):
        np.testing.assert_allclose(bj.run(total, joined, runner=runner), expected, rtol=1e-4)


def test_the_rows_are_found_again(tmp_path, monkeypatch):
    first = bj.join(LEFT, RIGHT, "id", folder=tmp_path, how="inner")
    monkeypatch.setattr(joining, "shuffle", None)
    again = bj.join(LEFT, RIGHT, "id", folder=tmp_path, how="inner")
    assert again.unmatched == first.unmatched
    np.testing.assert_array_equal(again.read(0, N)[0], first.read(0, N)[0])
    with pytest.raises(OptionsError, match="holds what was made of another table: how differ"):
        bj.join(LEFT, RIGHT, "id", folder=tmp_path)


def test_texts_are_keys(tmp_path, small):
    def texts(keys):
        names = np.array([f"user-{key}".encode() for key in keys], "S12")
        return names.view(np.uint8).reshape(len(keys), 12)

    left, right = ({**table, "id": texts(table["id"])} for table in (LEFT, RIGHT))
    joined = bj.join(left, right, "id", folder=tmp_path)
    found = jax.tree_util.tree_unflatten(joined.treedef, joined.read(0, N))
    rows = {bytes(key): row for row, key in enumerate(left["id"])}
    order = [rows[bytes(key)] for key in found["id"]]
    np.testing.assert_array_equal(found["x"], LEFT["x"][order])


ATTEMPTS = {
    "a key twice": (
        {"right": {**RIGHT, "id": np.r_[RIGHT["id"][1], RIGHT["id"][1:]]}},
        SourceError, r"found the key .* twice in the right table, in rows 0 and 1",
    ),
    "a key in one": (
        {"left": {**LEFT, "id": np.r_[np.int64(10**6), IDS[1:]]}},
        SourceError, "table only, expected the same keys in both; how='inner'",
    ),
    "other types": (
        {"right": {**RIGHT, "id": RIGHT["id"].astype(np.int32)}}, StructureError, "one type in",
    ),
    "a leaf in both": ({"right": {**RIGHT, "x": RIGHT["y"]}}, StructureError, "the leaf 'x' in"),
    "no such leaf": ({"on": "user"}, StructureError, "join: found no leaf 'user' in a dict of"),
    "floats": ({"on": "x"}, StructureError, "expected an integer in each row"),
    "how": ({"how": "outer"}, OptionsError, "found 'outer', expected one of same, inner"),
    "a url": ({"folder": "gs://b/j"}, OptionsError, "found the URL"),
    "a stream": ({"right": bj.from_chunks(lambda: [RIGHT])}, SourceError, "known length"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
def test_bad_input(name, tmp_path):
    change, kind, message = ATTEMPTS[name]
    arguments = {"left": LEFT, "right": RIGHT, "on": "id", "folder": tmp_path / "j", **change}
    with pytest.raises(kind, match=message):
        bj.join(**arguments)
