"""Blocks of members of any cut and order, merged to the same files."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from beamjax import collecting
from beamjax.errors import SourceError
from beamjax.sources.one_member import MemberType
from beamjax.sources.source_base import LeafSpec


def collecting_in(folder, indexed, block_bytes, part_bytes):
    member = MemberType("from_beam", 0, (LeafSpec((), np.dtype("int8")),))
    where = str(folder)
    return collecting.Collecting(where, where, member, indexed, False, block_bytes, 0, part_bytes)


def collected(what, values, numbers, cuts, limit):
    """Collects members of these numbers, cut to bundles."""
    blocks = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        rows = [[np.int8(values[i]).tobytes()] for i in numbers[start:stop]]
        keys = [what.key(row, i) for row, i in zip(rows, numbers[start:stop], strict=True)]
        blocks.append(what.block(keys, rows))
    saved = [what.save_block(block) for block in collecting.gathered(iter(blocks), limit)]
    for part in range(what.list_blocks(saved, [])):
        what.write(part)


@hypothesis.given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.booleans(), st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_blocks_of_any_cut_make_the_same_files(tmp_path_factory, values, indexed, data):
    part_bytes = data.draw(st.integers(16, 400))
    found = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("d")
        what = collecting_in(folder, indexed, data.draw(st.integers(1, 99)), part_bytes)
        order = data.draw(st.permutations(range(len(values))))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(values)))) | {len(values)})
        collected(what, values, order, cuts, data.draw(st.integers(1, 2000)))
        found.append({path.name: path.read_bytes() for path in folder.glob("part-*")})
    assert found[0] == found[1]
    arrays = [np.load(path) for path in sorted(folder.glob("part-*"))]
    assert {array.dtype for array in arrays} == {np.dtype(np.int8)}
    members = np.concatenate(arrays).tolist()
    assert members == values if indexed else sorted(members) == sorted(values)


@hypothesis.given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(16, 400))
@hypothesis.settings(max_examples=60, deadline=None)
def test_numbers_are_a_permutation_or_refused(tmp_path_factory, numbers, part_bytes):
    what = collecting_in(tmp_path_factory.mktemp("d"), True, 40, part_bytes)
    if sorted(numbers) == list(range(len(numbers))):
        collected(what, range(31), numbers, [len(numbers)], 100)
        return
    told = f"{len(numbers)} members are numbered 0 to {len(numbers) - 1}, each once; found"
    with pytest.raises(SourceError, match=told):
        collected(what, range(31), numbers, [len(numbers)], 100)
