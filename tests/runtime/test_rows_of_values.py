"""Values between steps: the rows of a value of several parts."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import beamjax as bj
from beamjax.plan.steps import ValueType
from beamjax.runtime.values import Leaf, Part, Reader, Ref, placed, ref_to, rows_of, stacked


@dataclass
class Stored:
    """An array in the store, which records how often it is read."""

    values: np.ndarray
    reads: list = field(default_factory=list)

    def read(self, start, stop):
        self.reads.append((start, stop))
        return self.values[start:stop]

    def array(self):
        return self.read(0, len(self.values))


def parts_of(whole, cuts, kinds):
    """An array as a value of parts of these kinds: of this process, of the store, of a source."""
    bounds = sorted({0, len(whole), *cuts})
    for start, stop, kind in zip(bounds, bounds[1:], kinds, strict=False):
        rows = whole[start:stop]
        data = {
            "array": rows,
            "stored": Stored(rows),
            "source": Leaf(bj.from_arrays(rows), 0, False),
        }
        yield Part(start, stop - start, data[kind])


KIND = st.sampled_from(["array", "stored", "source"])


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 20),
    cuts=st.lists(st.integers(1, 19), max_size=3),
    kinds=st.lists(KIND, min_size=5, max_size=5),
    numbers=st.lists(st.integers(0, 19), max_size=12),
    entries=st.sampled_from(["whole", "stacked", "entry"]),
)
def test_rows_of_parts_are_those_of_the_whole(n, cuts, kinds, numbers, entries):
    whole = np.arange(n * 6, dtype=np.float32).reshape(n, 3, 2)
    parts = tuple(parts_of(whole, [cut % n for cut in cuts], kinds))
    value = Ref("float32", (3, 2), n, parts)
    if entries == "stacked":
        value = stacked(ValueType((2, 3, 2), "float32"), n, [value, placed(-whole)])
        whole = np.stack([whole, -whole], 1)
    elif entries == "entry":
        value, whole = value.entry(1), whole[:, 1]
    numbers = np.array([number % n for number in numbers], np.int32)
    np.testing.assert_array_equal(rows_of(value, numbers).array(), whole[numbers])
    for part in parts:
        assert not isinstance(part.data, Stored) or len(part.data.reads) <= 1


def test_equal_rows_of_one_source_are_read_once():
    reads = []

    class Clients:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            reads.append(index)
            return {"x": np.float32(index), "y": np.int32(-index)}

    source, numbers = bj.from_random_access(Clients()), np.array([7, 2, 5])
    types = ValueType((), "float32"), ValueType((), "int32")
    leaves = [ref_to(Leaf(source, leaf, False), types[leaf], 9) for leaf in (0, 1)]
    reads.clear()
    values = {"xy"[leaf]: rows_of(ref, numbers.copy()) for leaf, ref in enumerate(leaves)}
    found = Reader.of(values, False).read(["x", "y"], 0, 3)
    assert (found["x"].tolist(), found["y"].tolist()) == ([7, 2, 5], [-7, -2, -5])
    assert sorted(reads) == [2, 5, 7]
