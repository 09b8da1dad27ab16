"""Placed inputs that a pipeline of Beam made, in files."""

from __future__ import annotations

from collections.abc import Sequence

from beamjax.plan.dropping import Dropped
from beamjax.sources.arrays.npy_source import NpySeries
from beamjax.sources.source_base import LeafSpec, PyTreeDef


class CollectedMembers(NpySeries):
    """Members in files, made from the elements of a PCollection; see `beamjax.from_beam`.

    Attributes:
      folder: of the files.
      dropped: elements that were left out, with `on_error="drop"`.
    """

    def __init__(
        self,
        folder: str,
        files: Sequence[Sequence[tuple[str, int]]],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef,
        dropped: Sequence[Dropped],
    ) -> None:
        """Use `beamjax.from_beam`."""
        super().__init__(files, leaves, treedef)
        self.folder = folder
        self.dropped = tuple(dropped)
