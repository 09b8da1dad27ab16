"""CRC-32C and packed integers by NumPy, against encoders that are not ours to decode with."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tfrecords import crc32c as by_bytes
from tfrecords import varint

from beamjax.sources.records import crc32c
from beamjax.sources.records.varints import decode_varints

# RFC 3720, appendix B.4, and the check value of the catalogue of CRC algorithms.
KNOWN = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    b"123456789": 0xE3069283,
    b"": 0,
}


@pytest.mark.parametrize("way", ["numpy", "library"])
def test_known_values_lanes_and_large_records(way, monkeypatch):
    if way == "numpy":
        monkeypatch.setattr(crc32c, "_library", lambda: None)
    elif crc32c._library() is None:
        pytest.skip("GOOGLE_CRC32C IS NOT TESTED: it is not installed")
    found = crc32c.checksums(list(KNOWN))
    assert found.dtype == np.uint32
    assert found.tolist() == list(KNOWN.values())
    assert len(crc32c.checksums([])) == 0
    large = np.random.default_rng(0).bytes(300_001)
    sums = [by_bytes(large), by_bytes(large[:-1])]
    assert crc32c.checksums([large, large[:-1]]).tolist() == sums
    assert crc32c.checksums([memoryview(large)]).tolist() == sums[:1]
    monkeypatch.setattr(crc32c, "_LANES", 256)
    for size in (1, 63, 64, 65, 1000):
        data = large[:size]
        for count in (1, 3, 5000):
            records = [data] * (count - 1) + [data[::-1]]
            expected = [by_bytes(data)] * (count - 1) + [by_bytes(data[::-1])]
            assert crc32c.checksums(records).tolist() == expected
    rows = np.random.default_rng(0).integers(0, 256, (50, 8), np.uint8)
    found = crc32c.checksums_of_rows(rows).tolist()
    assert found == [by_bytes(row.tobytes()) for row in rows]


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(st.lists(st.binary(max_size=300), max_size=20))
def test_many_records(records):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crc32c, "_library", lambda: None)
        found = crc32c.checksums(records)
    assert found.tolist() == list(map(by_bytes, records))


INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(st.integers(0, 5), st.data(), st.lists(st.binary(max_size=12), max_size=5))
def test_packed_integers(count, data, others):
    lists = data.draw(st.lists(st.lists(INT64, min_size=count, max_size=count), max_size=8))
    found = decode_varints([b"".join(map(varint, numbers)) for numbers in lists], count)
    assert found.dtype == np.int64
    assert found.tolist() == [number for numbers in lists for number in numbers]
    found = decode_varints(others, count)
    assert found is None or len(found) == count * len(others)


def test_lists_of_another_number_of_integers():
    for lists in (
        [b"\x01", b""], [b"\x01\x02", b"\x01"], [b"\x81", b"\x01\x01"], [b"\x80" * 10 + b"\x01"],
        [b"\x01\x80"], [b"", b"\x01\x02"], [b"\x80", b"\x80"],
    ):  # fmt: skip
        assert decode_varints(lists, 1) is None
