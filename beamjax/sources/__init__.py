"""Placed inputs that are read on the workers: `Source`, and a file for each kind of data."""

from beamjax.sources.array_source import ArraySource as ArraySource
from beamjax.sources.array_source import from_arrays as from_arrays
from beamjax.sources.arrow_source import ArrowSource as ArrowSource
from beamjax.sources.arrow_source import from_arrow as from_arrow
from beamjax.sources.chunk_source import ChunkSource as ChunkSource
from beamjax.sources.chunk_source import from_chunks as from_chunks
from beamjax.sources.npy_parts import NpyParts as NpyParts
from beamjax.sources.npy_parts import from_npy_parts as from_npy_parts
from beamjax.sources.npy_source import NpySource as NpySource
from beamjax.sources.npy_source import from_npy as from_npy
from beamjax.sources.npz_source import NpzSource as NpzSource
from beamjax.sources.npz_source import from_npz as from_npz
from beamjax.sources.parquet_source import ParquetSource as ParquetSource
from beamjax.sources.parquet_source import from_parquet as from_parquet
from beamjax.sources.source_base import HoldsLeaves as HoldsLeaves
from beamjax.sources.source_base import LeafSpec as LeafSpec
from beamjax.sources.source_base import Source as Source
from beamjax.sources.source_base import StreamSource as StreamSource
from beamjax.sources.source_base import live_spec as live_spec
from beamjax.sources.source_base import lookup as lookup
from beamjax.sources.source_base import open_spec as open_spec
from beamjax.sources.source_base import register as register
from beamjax.sources.source_base import release as release
from beamjax.sources.zarr_source import ZarrSource as ZarrSource
from beamjax.sources.zarr_source import from_zarr as from_zarr
