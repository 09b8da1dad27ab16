"""How much memory a run takes on each accelerator of a worker: an estimate, from the plan.

XLA tells what bodies need besides their arguments where this process computes on the platform, so
that it can compile them for it. Otherwise that is counted from their equations, which XLA may fuse,
reorder and give room of its own. What a driver and its libraries take is not counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax import export

from beamjax.bodies.export import default_platform, with_x64
from beamjax.diagnostics.memory import MAX_EXECUTORS, Part, StepMemory, some, steps_in_loops
from beamjax.options import Options
from beamjax.plan.steps import Body, Map, Plan, Server, walk
from beamjax.storage.shared_cache import SharedCache

COPIES = 2
"""Shards on a device: one that it computes, and one on its way there or back."""


@dataclass(frozen=True)
class DeviceEstimate:
    """What a device of a worker holds, about.

    Attributes:
      platform: of the device.
      kept: whatever step the worker is at.
      steps: what each takes besides.
      compiled: whether XLA told what bodies need, rather than their equations.
    """

    platform: str
    kept: tuple[Part, ...]
    steps: tuple[StepMemory, ...]
    compiled: bool

    @property
    def nbytes(self) -> int:
        """At the step that takes most."""
        return sum(p.nbytes for p in self.kept) + max((s.nbytes for s in self.steps), default=0)

    @property
    def made_from(self) -> str:
        """How it was found, for people."""
        if self.compiled:
            return f"what bodies need is told by XLA, which has compiled them for {self.platform}"
        return (
            f"what bodies need is counted from their equations, as this process does not compile "
            f"for {self.platform}: XLA may take less, or room of its own"
        )


def device_estimates(plan: Plan, options: Options, beam: bool) -> list[DeviceEstimate]:
    """What devices of the platforms hold that a plan is for; a CPU has none besides its process.

    Args:
      plan: to be run.
      options: of the run.
      beam: whether there is a Beam pipeline, whose workers keep broadcasts for later shards.
    """
    found = {platform for body in plan.bodies.values() for platform in body.artefacts}
    known = options.platforms or ()
    platforms = sorted(found, key=lambda name: (name not in known, name))
    return [_estimate(plan, name, beam) for name in platforms if name != "cpu"]


def _estimate(plan: Plan, platform: str, beam: bool) -> DeviceEstimate:
    told = {key: compiled_bytes(body, platform, plan.x64) for key, body in plan.bodies.items()}
    working = {key: body.working for key, body in plan.bodies.items()}
    working |= {key: nbytes for key, nbytes in told.items() if nbytes is not None}
    in_loops = steps_in_loops(plan)
    steps = list(walk(plan.steps))
    kept: list[tuple[str, float]] = []
    if beam:
        maps = [step for step in steps if isinstance(step, Map)]
        times = {step.name: MAX_EXECUTORS if step.name in in_loops else 1 for step in maps}
        sums = [_bytes(plan, step.broadcasts) for step in maps for _ in range(times[step.name])]
        kept = [("broadcasts", sum(sorted(sums)[-MAX_EXECUTORS:]))]
    parts = [
        StepMemory(step.name, "", tuple(some(_of_step(plan, step, working, beam))))
        for step in steps
        if isinstance(step, Map | Server)
    ]
    exported = [told[key] for key, body in plan.bodies.items() if platform in body.artefacts]
    return DeviceEstimate(platform, tuple(some(kept)), tuple(parts), None not in exported)


def _of_step(
    plan: Plan, step: Map | Server, working: Mapping[str, int], beam: bool
) -> Iterator[tuple[str, float]]:
    if isinstance(step, Server):
        yield "inputs", _bytes(plan, step.inputs)
        yield "computing", working[step.body]
        return
    size = plan.shard_sizes[step.placement]
    if not beam:
        yield "broadcasts", _bytes(plan, step.broadcasts)
    yield "members of a shard, twice", COPIES * size * _bytes(plan, step.operands)
    yield "computing", max(working[body] for body in step.all_bodies)
    # Those of the shard before are copied to the host while the next one is computed.
    partials = sum(leaf.nbytes for combine in step.combines for leaf in combine.leaves)
    partials += sum(lane.size * np.dtype(lane.dtype).itemsize for lane in step.lanes)
    yield "results of the shard before", size * _bytes(plan, step.results) + partials


def compiled_bytes(body: Body, platform: str, x64: bool) -> int | None:
    """What XLA says that a body takes besides its arguments: results, temporaries and code.

    Args:
      body: of a plan.
      platform: of the device.
      x64: as in the plan.

    Returns:
      Bytes; None where this process can't compile the body for the platform.
    """
    if platform not in body.artefacts or platform != default_platform():
        return None
    artefact = body.artefacts[platform]
    key = hashlib.blake2b(artefact).digest(), x64  # so that the cache holds no executables
    return _COMPILED.get(key, lambda: _told_by_xla(artefact, x64))


_COMPILED: SharedCache[int | None] = SharedCache(256, lambda _: 1)


def _told_by_xla(artefact: bytes, x64: bool) -> int | None:
    with with_x64(x64):
        exported = export.deserialize(bytearray(artefact))
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        found = jax.jit(exported.call).lower(*specs).compile().memory_analysis()
    if found is None:  # not every backend tells
        return None
    code = found.generated_code_size_in_bytes
    return int(found.temp_size_in_bytes + found.output_size_in_bytes + code)


def _bytes(plan: Plan, names: Iterable[str]) -> int:
    """Bytes of values; of placed ones, those of a member."""
    return sum(plan.values[name].nbytes for name in names)
