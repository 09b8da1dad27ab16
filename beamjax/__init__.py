"""One JAX MapReduce program, the same numbers in-process and on Apache Beam."""

from __future__ import annotations as _annotations

import importlib as _importlib
import importlib.util as _util

from beamjax._version import __version__ as __version__

_importlib.import_module("beamjax._unraisable")

_MODULES = {
    "errors": (
        "ArrayFormatError BeamjaxError CheckpointError JobCancelledError JobError "
        "OptionsError OutsideProgramError PlacementError SourceError StagingError "
        "StructureError VerificationError WorkerError"
    ),
    "execution": "launch pipeline run transform",
    "explanation": "explain",
    "jobs.job": "Job JobState open_job",
    "jobs.report": "Report",
    "ops.combining": "reduce",
    "ops.keyed": "reduce_by_key",
    "ops.neighbours": "neighbours",
    "ops.operators": (
        "broadcast map_fn program reduce_all reduce_any reduce_argmax reduce_argmin "
        "reduce_max reduce_mean reduce_min reduce_prod reduce_std reduce_sum reduce_var "
        "reduce_weighted_mean"
    ),
    "ops.quantiles": "quantile",
    "ops.weights": "bootstrap_weights influence reweight standard_error",
    "options": "Options",
    "replaying": "replay",
    "runtime.materialized_outputs": "open_placed",
    "sessions": "Session session",
    "sources.array_source": "from_arrays",
    "sources.arrays.npy_source": "from_npy from_npz",
    "sources.arrays.placed": "Placed",
    "sources.arrays.zarr_source": "from_zarr",
    "sources.dataset_openers": "opens_dataset",
    "sources.derived_sources": "sample take",
    "sources.ragged_source": "from_ragged",
    "sources.random_access_source": "from_random_access",
    "sources.range_source": "from_range",
    "sources.records.tfrecord_source": "from_tfrecord",
    "sources.source_base": "Source StreamSource",
    "sources.streams.chunk_source": "from_chunks",
    "sources.tables.table_opening": "from_arrow from_csv from_parquet",
    "tables.pcollections": "from_beam",
    "verification": "verify",
}
"""The public names by their modules; `__init__.pyi` has the same for type checkers."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = list(_MODULE_OF)


def __dir__() -> list[str]:
    # Without submodules, which become attributes when they are imported: they are not public.
    return [*(name for name in globals() if name.startswith("__")), *_MODULE_OF]


def __getattr__(name: str) -> object:
    """Imports a public name at its first use: that of all modules would take as long as a call."""
    module = _MODULE_OF.get(name)
    if module is not None:
        globals()[name] = value = getattr(_importlib.import_module(f"beamjax.{module}"), name)
        return value
    if not name.startswith("__") and _util.find_spec(f"beamjax.{name}") is not None:
        return _importlib.import_module(f"beamjax.{name}")
    raise AttributeError(f"module 'beamjax' has no attribute {name!r}")
