from typing import Any as _Any

from beamjax.pipelines import log_filters

log_filters.install()  # before any module of Beam is imported


def __getattr__(name: str) -> _Any:
    """Imports `inference` only when it is used, since `RunInference` takes a second to import."""
    if name in ("JaxModelHandler", "save_model"):
        from beamjax.pipelines import inference

        return getattr(inference, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
