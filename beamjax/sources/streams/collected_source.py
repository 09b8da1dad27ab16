"""Placed inputs that a pipeline of Beam made, in files."""

from __future__ import annotations

from collections.abc import Sequence

from beamjax.plan.dropping import Dropped
from beamjax.sources.arrays.part_files import Part, PartFiles
from beamjax.sources.source_base import LeafSpec, PyTreeDef


class CollectedMembers(PartFiles):
    """Members in files, made from the elements of a PCollection; see `beamjax.from_beam`.

    Attributes:
      folder: of the files.
      dropped: elements that were left out, with `on_error="drop"`.
    """

    def __init__(
        self,
        folder: str,
        parts: Sequence[Part],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef,
        dropped: Sequence[Dropped],
    ) -> None:
        """Use `beamjax.from_beam`."""
        super().__init__(folder, parts, leaves, treedef)
        self.dropped = tuple(dropped)
