"""One JAX MapReduce program, the same numbers in-process and on Apache Beam."""

import os as _os

from beamjax import _compat
from beamjax._version import __version__ as __version__
from beamjax.api import broadcast as broadcast
from beamjax.api import map_fn as map_fn
from beamjax.api import program as program
from beamjax.api import reduce_all as reduce_all
from beamjax.api import reduce_any as reduce_any
from beamjax.api import reduce_argmax as reduce_argmax
from beamjax.api import reduce_argmin as reduce_argmin
from beamjax.api import reduce_max as reduce_max
from beamjax.api import reduce_mean as reduce_mean
from beamjax.api import reduce_min as reduce_min
from beamjax.api import reduce_prod as reduce_prod
from beamjax.api import reduce_sum as reduce_sum
from beamjax.api import reduce_weighted_mean as reduce_weighted_mean
from beamjax.errors import ArrayFormatError as ArrayFormatError
from beamjax.errors import BeamjaxError as BeamjaxError
from beamjax.errors import CheckpointError as CheckpointError
from beamjax.errors import JobCancelledError as JobCancelledError
from beamjax.errors import JobError as JobError
from beamjax.errors import OptionsError as OptionsError
from beamjax.errors import OutsideProgramError as OutsideProgramError
from beamjax.errors import PlacementError as PlacementError
from beamjax.errors import SourceError as SourceError
from beamjax.errors import StagingError as StagingError
from beamjax.errors import StructureError as StructureError
from beamjax.errors import VerificationError as VerificationError
from beamjax.errors import WorkerError as WorkerError
from beamjax.execution import launch as launch
from beamjax.execution import run as run
from beamjax.execution import transform as transform
from beamjax.explanation import explain as explain
from beamjax.grouping import group_by as group_by
from beamjax.jobs import Job as Job
from beamjax.jobs import JobState as JobState
from beamjax.jobs import open_job as open_job
from beamjax.joining import join as join
from beamjax.kept import open_placed as open_placed
from beamjax.keyed import Keyed as Keyed
from beamjax.options import Options as Options
from beamjax.pcollections import from_beam as from_beam
from beamjax.progress import Progress as Progress
from beamjax.reductions import reduce as reduce
from beamjax.reductions import reduce_by_key as reduce_by_key
from beamjax.sources import Source as Source
from beamjax.sources import from_arrays as from_arrays
from beamjax.sources import from_npy as from_npy
from beamjax.sources import from_ragged as from_ragged
from beamjax.sources.array_record_source import from_array_record as from_array_record
from beamjax.sources.arrow_source import from_arrow as from_arrow
from beamjax.sources.chunk_source import from_chunks as from_chunks
from beamjax.sources.dataset_openers import opens_dataset as opens_dataset
from beamjax.sources.keyed_table import KeyedTable as KeyedTable
from beamjax.sources.keyed_table import open_keyed as open_keyed
from beamjax.sources.npy_parts import from_npy_parts as from_npy_parts
from beamjax.sources.npz_source import from_npz as from_npz
from beamjax.sources.parquet_source import from_parquet as from_parquet
from beamjax.sources.placed import Placed as Placed
from beamjax.sources.random_access_source import from_random_access as from_random_access
from beamjax.sources.range_source import from_range as from_range
from beamjax.sources.source_base import StreamSource as StreamSource
from beamjax.sources.taken_source import sample as sample
from beamjax.sources.taken_source import take as take
from beamjax.sources.tfrecord_source import from_tfrecord as from_tfrecord
from beamjax.sources.zarr_source import from_zarr as from_zarr
from beamjax.verification import verify as verify

_compat.hide_frames(_os.path.dirname(__file__))
