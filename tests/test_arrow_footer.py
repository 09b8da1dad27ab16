"""Headers of Arrow files against what pyarrow finds in the record batches."""

import io

import numpy as np
import pyarrow as pa
import pytest

from beamjax.sources.arrow_footer import batch_headers

SCHEMA = pa.schema(
    [("x", pa.float32()), ("y", pa.list_(pa.int8())), ("d", pa.dictionary(pa.int8(), pa.string()))],
    metadata={"about": "a table"},
)


def written(counts, compression=None, legacy=False):
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(
        compression=compression,
        use_legacy_format=legacy,
        metadata_version=pa.ipc.MetadataVersion.V4 if legacy else pa.ipc.MetadataVersion.V5,
    )
    with pa.ipc.new_file(sink, SCHEMA, options=options) as writer:
        for n in counts:
            x = np.arange(n, dtype=np.float32)
            y = pa.array([[1] * (i % 3) for i in range(n)], pa.list_(pa.int8()))
            d = pa.DictionaryArray.from_arrays(np.zeros(n, np.int8), ["a"])
            writer.write_batch(pa.record_batch([pa.array(x), y, d], SCHEMA))
    return sink.getvalue()


@pytest.mark.parametrize("counts", [[], [0], [5], [1, 0, 7, 100_000], [3] * 300])
@pytest.mark.parametrize("how", [{}, {"compression": "zstd"}, {"compression": "lz4"}])
def test_headers_say_what_is_in_the_batches(counts, how):
    found = batch_headers(io.BytesIO(written(counts, **how)))
    assert [header.rows for header in found] == counts
    assert all(header.packed == bool(how) for header in found)
    assert batch_headers(io.BytesIO(written(counts)), 1) == [(n, False) for n in counts[:1]]


def test_the_older_format():
    found = batch_headers(io.BytesIO(written([2, 4], legacy=True)))
    assert [header.rows for header in found] == [2, 4]


def test_what_is_damaged_is_a_value_error():
    data, refused = written([5, 6]), 0
    for size in range(len(data)):
        with pytest.raises(ValueError):
            batch_headers(io.BytesIO(data[:size]))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 255
        try:
            batch_headers(io.BytesIO(bytes(damaged)))
        except ValueError:
            refused += 1
    assert refused > 50
