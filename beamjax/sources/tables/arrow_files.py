"""Files of Arrow: IPC files, also known as Feather, by record batches."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from beamjax.sources.arrays.data_files import DataFile, is_url, look, open_file, readable
from beamjax.sources.tables.arrow_columns import arrow_readable, checked_rows, checked_schema
from beamjax.sources.tables.arrow_types import path_of
from beamjax.sources.tables.table_files import Format, RowRange, TableFile, check_unchanged
from beamjax.storage.shared_cache import SharedCache

_EXPECTED = "a file of Arrow (IPC with a footer, or Feather of version 2)"


class ArrowFormat(Format):
    """Record batches, which are views of the map of a local file that is not compressed."""

    batch_kind = "record batch"
    endings = (".arrow", ".feather", ".ipc")

    def head(self, path: str) -> tuple[TableFile, Any]:
        file = look(path)
        whole = _opened(file)
        # Only batches say how many rows they have. Of a file that is not mapped, read one column.
        first = whole if whole.mapped or not whole.schema.names else _opened(file, [0])
        rows = [len(first.batch(number)) for number in range(first.count)]
        with readable(file.path, _EXPECTED):
            return TableFile(file, checked_rows(rows)), whole.schema

    def table(self, file: TableFile, number: int, types: Mapping[str, str], rows: RowRange) -> Any:
        file.file.check()
        whole = _opened(file.file)
        # A different number of batches is an error of `check_unchanged`. That of rows shows when
        # the batch is decoded.
        counts = file.rows if whole.count == len(file.rows) else (0,) * whole.count
        check_unchanged(file, self.batch_kind, number, counts, whole.schema, list(types))
        if whole.mapped:
            return whole.batch(number)
        fields = {path_of(whole.schema, name)[0]: None for name in types}
        requested = [whole.schema.get_field_index(name) for name in fields]
        return _opened(file.file, requested).batch(number)

    def is_view(self, file: DataFile) -> bool:
        return not is_url(file.path) and _opened(file).mapped


class _Reader:
    """An open file, mapped if it is local."""

    def __init__(self, file: DataFile, fields: Sequence[int]) -> None:
        import pyarrow as pa

        self._file = file
        self._lock = threading.Lock()  # The first batch also reads dictionaries into the reader.
        with self._readable():
            if is_url(file.path):
                raw = open_file(file.path)
                weakref.finalize(self, raw.close)  # The cache may drop it while a thread reads.
                source = pa.PythonFile(raw, "r")
            else:
                source = pa.memory_map(file.path)
            options = pa.ipc.IpcReadOptions(included_fields=list(fields))
            self._reader = pa.ipc.open_file(source, options=options)
            self.schema = checked_schema(self._reader.schema)
            self.count: int = self._reader.num_record_batches
            self.mapped = not is_url(file.path) and not fields and self._is_mapped(source)
            """Whether batches are read without a copy, which choosing columns prevents."""

    def _is_mapped(self, source: Any) -> bool:
        """Whether the first buffer with data is in the map of the file, so not decompressed."""
        source.seek(0)
        whole = source.read_buffer()
        for number in range(self.count):
            batch = self._reader.get_batch(number)
            for index in range(batch.num_columns):
                try:
                    buffers = batch.column(index).buffers()
                except KeyError:  # pyarrow does not know the type; others may be read.
                    continue
                for buffer in buffers:
                    if buffer is not None and buffer.size:
                        return bool(0 <= buffer.address - whole.address < whole.size)
        return True

    def batch(self, number: int) -> Any:
        """A record batch."""
        with self._readable(f"record batch {number} of "), self._lock:
            return self._reader.get_batch(number)

    def _readable(self, part: str = "") -> contextlib.AbstractContextManager[None]:
        return arrow_readable(self._file.path, f"{part}{_EXPECTED}")


_READERS: SharedCache[_Reader] = SharedCache(64, lambda _: 1)
"""Open files, at most 64: reading a footer again takes longer than reading a small record batch."""


def _opened(file: DataFile, fields: Sequence[int] = ()) -> _Reader:
    return _READERS.get((file, tuple(fields)), lambda: _Reader(file, fields))
