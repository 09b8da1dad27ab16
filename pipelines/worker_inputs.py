"""Placed inputs of a plan as plain data, with which workers open them."""

from __future__ import annotations

from beamjax.pipelines.values.members import Uploads, in_files
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import SourceSpecs
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.values import Reader
from beamjax.sources.source_base import live_spec, register, spec_of
from beamjax.sources.streams.chunks import Streams


def source_specs(
    inputs: Inputs, store: Store, shared: bool, known: Uploads | None = None
) -> SourceSpecs:
    """Placed inputs as plain data."""
    reader = inputs.reader()
    if shared:
        return _live(reader)
    # Arrays are written to the store, as workers don't share the memory of this process; `known`
    # are uploads of earlier runs there.
    specs = [in_files(x, store, reader.x64, i, known) for i, x in enumerate(reader.sources)]
    return SourceSpecs(tuple(specs), reader.where, reader.x64)


def stream_specs(streams: Streams, shared: bool) -> SourceSpecs:
    """Sources of unknown length as plain data."""
    if not shared:
        return SourceSpecs(tuple(map(spec_of, streams.sources)), streams.where, streams.x64)
    return _live(streams)


def _live(inputs: Reader | Streams) -> SourceSpecs:
    """Specs with which workers in this process find the sources themselves."""
    tokens = tuple(map(register, inputs.sources))
    return SourceSpecs(tuple(map(live_spec, tokens)), inputs.where, inputs.x64, tokens)
