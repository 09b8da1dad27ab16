"""Placed inputs that are read on the workers: `Source`, and a file for each kind of data."""

from beamjax.sources.source_base import LeafSpec as LeafSpec
from beamjax.sources.source_base import Source as Source
