"""Members that a pipeline of the user has written to files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamjax.plan.dropping import Dropped
from beamjax.sources.arrays.part_files import Part, PartFiles
from beamjax.sources.source_base import LeafSpec, PyTreeDef, describe_source
from beamjax.storage.schema import from_plain, to_plain


class CollectedMembers(PartFiles):
    """Members in files, made from the elements of a PCollection; see `beamjax.from_beam`.

    Attributes:
      folder: the folder of the files.
      dropped: the elements that were left out with `on_error="drop"`.
    """

    manifest = "members.json"
    version = 2

    def __init__(
        self,
        folder: str,
        parts: Sequence[Part],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef,
        dropped: Sequence[Dropped] = (),
    ) -> None:
        """Use `beamjax.from_beam` or `beamjax.open_placed`."""
        super().__init__(folder, parts, leaves, treedef)
        self.dropped = tuple(dropped)

    def __str__(self) -> str:
        return describe_source(self, f"in {self.folder}")

    def _extra(self) -> dict[str, Any]:
        return {"dropped": to_plain(self.dropped)}

    def _take(self, record: dict[str, Any], path: str) -> None:
        self.dropped = tuple(from_plain(Dropped, each, path) for each in record["dropped"])
