"""CRC-32C by NumPy, against a byte at a time, known values, and `google_crc32c` where it is."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tfrecords import crc32c as by_bytes

from beamjax.sources import crc32c

# RFC 3720, appendix B.4, and the check value of the catalogue of CRC algorithms.
KNOWN = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    b"123456789": 0xE3069283,
    b"": 0,
}


@pytest.fixture(params=["numpy", "library"])
def checksums(request, monkeypatch):
    if request.param == "library":
        if crc32c._library() is None:
            pytest.skip("GOOGLE_CRC32C IS NOT TESTED: it is not installed")
    else:
        monkeypatch.setattr(crc32c, "_library", lambda: None)
    return crc32c.checksums


def test_known_values(checksums):
    found = checksums(list(KNOWN))
    assert found.dtype == np.uint32
    assert found.tolist() == list(KNOWN.values())
    assert len(checksums([])) == 0


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(st.lists(st.binary(max_size=300), max_size=20))
def test_many_records(records):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crc32c, "_library", lambda: None)
        found = crc32c.checksums(records)
    assert found.tolist() == list(map(by_bytes, records))


@pytest.mark.parametrize("count", [1, 3, 5000])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_lanes(count, size, checksums, monkeypatch):
    monkeypatch.setattr(crc32c, "_LANES", 256)
    data = np.random.default_rng(0).bytes(size)
    records = [data] * (count - 1) + [data[::-1]]
    assert checksums(records).tolist() == [by_bytes(data)] * (count - 1) + [by_bytes(data[::-1])]


def test_a_large_record(checksums):
    data = np.random.default_rng(0).bytes(300_001)
    assert checksums([data, data[:-1]]).tolist() == [by_bytes(data), by_bytes(data[:-1])]
    assert checksums([memoryview(data)]).tolist() == [by_bytes(data)]


def test_rows():
    rows = np.random.default_rng(0).integers(0, 256, (50, 8), np.uint8)
    expected = [by_bytes(row.tobytes()) for row in rows]
    assert crc32c.checksums_of_rows(rows).tolist() == expected
