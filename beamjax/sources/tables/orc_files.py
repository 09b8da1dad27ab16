"""Files of ORC, by stripes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from beamjax.sources.arrays.data_files import DataFile, is_url, look, open_file
from beamjax.sources.tables.arrow_columns import arrow_readable, checked_rows, checked_schema
from beamjax.sources.tables.table_files import Format, RowRange, TableFile, check_unchanged
from beamjax.storage.shared_cache import SharedCache


class OrcFormat(Format):
    """Stripes, each of which is decoded as a whole."""

    batch_kind = "stripe"
    endings = (".orc",)

    def head(self, path: str) -> tuple[TableFile, Any]:
        file = look(path)
        layout = _layout(file)
        return TableFile(file, layout.rows), layout.schema

    def table(self, file: TableFile, number: int, types: Mapping[str, str], rows: RowRange) -> Any:
        layout = _layout(file.file)
        check_unchanged(file, self.batch_kind, number, layout.rows, layout.schema, list(types))
        with _opened(file.file, f"stripe {number} of ") as orc:
            return orc.read_stripe(number, columns=list(types))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The rows of each stripe of a file, and its schema."""

    rows: tuple[int, ...]
    schema: Any


_LAYOUTS: SharedCache[_Layout] = SharedCache(1 << 16, lambda layout: len(layout.rows) + 1)


def _layout(file: DataFile) -> _Layout:
    def read() -> _Layout:
        with _opened(file) as orc:
            schema = checked_schema(orc.schema)
            # pyarrow does not say how many rows a stripe has, so one column is read.
            first: Sequence[str] = schema.names[:1]
            counts = [orc.read_stripe(i, columns=first).num_rows for i in range(orc.nstripes)]
            return _Layout(checked_rows(counts), schema)

    return _LAYOUTS.get(file, read)


@contextlib.contextmanager
def _opened(file: DataFile, part: str = "") -> Iterator[Any]:
    """A file, opened for one thread."""
    from pyarrow import orc

    with contextlib.ExitStack() as stack:
        stack.enter_context(arrow_readable(file.path, f"{part}a file of ORC"))
        source: Any = file.path
        if is_url(file.path):
            source = stack.enter_context(contextlib.closing(open_file(file.path)))
        yield orc.ORCFile(source)
