"""`replay`: calls the bodies of a job on single members, as Python functions in this process."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax import _compat
from beamjax._text import hint, listed
from beamjax.bodies.export import value_type
from beamjax.call import LOCAL, Call, counted
from beamjax.errors import BeamjaxError, Failure, JobError, OptionsError
from beamjax.execution import bind_inputs
from beamjax.interpreters.cutting.stages import Emission, MapStage, walk
from beamjax.interpreters.lowering.map_bodies import map_body
from beamjax.interpreters.placement.places import FileGroups, MemberAxis
from beamjax.interpreters.planning import Planned, make_plan, with_file_starts
from beamjax.interpreters.program import Eqn, Var
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, ReductionRule
from beamjax.interpreters.staging.arguments import FlatCall, flatten_call
from beamjax.jobs.job import Job, JobState, open_job
from beamjax.ops.primitives import map_p
from beamjax.ops.python_calls import collecting, keeping
from beamjax.options import Options, parse_options
from beamjax.plan import steps as plan_steps
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map, Plan
from beamjax.runtime.fingerprints import Fingerprint, cuts_fingerprint, cuts_key
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.local import values_before


def replay(
    failed: BeamjaxError | Job | str | os.PathLike[str],
    fn: Callable[..., Any] | None = None,
    *args: Any,
    member: int | None = None,
    shard: int | None = None,
    step: str | None = None,
    round: int | None = None,
    options: Any = None,
) -> Any:
    """Calls the body of a job for single members, as a plain Python function.

    The function is called in this thread with the arrays of one member, without `jax.jit` and
    `jax.vmap`. So `breakpoint()`, `print`, `jax.disable_jit` and `checkify` work in it, and an
    exception has its own traceback. beamjax reads the sources again, and recomputes the passes and
    the rounds of loops before the step in this process.

        try:
            beamjax.run(fn, *args)
        except beamjax.WorkerError as error:
            beamjax.replay(error)

    Args:
      failed: an error that a run in this process raised, which needs no other argument; or a job or
        the path or URL of its folder, in any state, from any process that ran `fn(*args)`.
      fn: the function of the job, or a corrected version of it. An error does not need it.
      *args: the arguments of the job, if `fn` is given.
      member: the index of one member.
      shard: the number of a shard, whose members are called sequentially. Without `member` and
        `shard`, it is the shard that failed.
      step: the name of a step of the plan (`map_clients_0`), or of the function that is mapped. By
        default the step that failed, or the first one.
      round: for a step in a loop: the number of complete rounds before it, of all loops. By default
        the round that failed, or the first one.
      options: the options of the job that change its values, such as `on_error`, if `fn` is given.

    Returns:
      The tree that the body returns for the member; for a shard a list of such trees, one for each
      member. For a step with several bodies, the result of the last one, or of the one that `step`
      names. For derived code without a Python function, such as `jax.grad` of a program, a flat
      list of its results.

    Raises:
      Exception: any exception that the body raises.
      JobError: `fn` is missing, or its placements have other sizes or other files than those of the
        job; or there is no job in the folder.
      OptionsError: there is no such step, shard or member; or no shard of the step failed, and
        neither `member` nor `shard` is given.
      StagingError: as for `run`.
      PlacementError: as for `run`.
      StructureError: as for `run`.
      SourceError: as for `run`.
    """
    with contextlib.ExitStack() as stack:
        restaged, known = stack.enter_context(_call_of(failed, fn, args, options))
        return _replay(restaged, known, member, shard, step, round)


@dataclass(frozen=True)
class _Restaged:
    """A call to stage again; `values` are its flat arguments, as `Inputs` takes them."""

    call: FlatCall
    options: Options
    values: Sequence[Any] | None = None

    def planned(self, known: _Known) -> tuple[Planned, Inputs]:
        """The plan with bodies that are Python functions, and its inputs."""
        options, cut = self.options, None if known.cuts is None else bool(known.cuts)
        if len(set(known.shard_sizes.values())) == 1:
            # Passes over members in order have ranges of this size, where the job had the option.
            options = replace(options, shard_size=next(iter(known.shard_sizes.values())))
        sizes = known.shard_sizes or None
        with keeping():
            planned = make_plan(self.call, options, shard_sizes=sizes, cut_at_files=cut)
        planned = self._cut(planned, known.cuts)
        plan = planned.plan
        if self.values is None:
            return planned, bind_inputs(plan, self.call)
        return planned, Inputs(plan, [*self.values[: len(self.call.arguments)], *plan.constants])

    def _cut(self, planned: Planned, cuts: Fingerprint | None) -> Planned:
        """Cuts shards at the files at which the job cut them, in groups of any size."""
        # The size depends on options of the job, which its folder does not record. If no groups
        # of the files have these cuts, the files are others.
        planned = with_file_starts(planned, self.call.arguments)
        if cuts is None:
            return planned
        for name in planned.plan.file_starts:
            for exponent in range(32):
                if cuts_fingerprint(planned.plan)[cuts_key(name)] == cuts.get(cuts_key(name)):
                    break
                groups = planned.placed.file_groups | {name: FileGroups(1 << exponent, rows=0)}
                planned = replace(planned, placed=replace(planned.placed, file_groups=groups))
                planned = with_file_starts(planned, self.call.arguments)
            else:
                raise JobError(
                    f"replay: found other files of {name!r} than those of the job; pass its "
                    "function and arguments"
                )
        return planned


@dataclass(frozen=True)
class _Known:
    """What is known of a job and its failure."""

    failure: Failure | None  # of the job, if it failed on a shard
    rounds: int  # the number of complete rounds before the failure
    shard_sizes: Mapping[str, int]  # members in a shard, by placement, as far as it is known
    # The number of members, by placement, as far as it is known.
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    # Where shards are cut at files, by `cuts_fingerprint`; None if it is not known.
    cuts: Fingerprint | None = None


@contextlib.contextmanager
def _call_of(
    failed: Any, fn: Callable[..., Any] | None, args: Sequence[Any], options: Any
) -> Iterator[tuple[_Restaged, _Known]]:
    if isinstance(failed, str | os.PathLike):
        failed = open_job(failed)
    if fn is None:
        error = _error_of(failed) if isinstance(failed, Job) else failed
        run = getattr(error, "run", None)
        if not (isinstance(error, BeamjaxError) and isinstance(run, Call) and run.can_replay):
            raise JobError(
                f"replay: found {failed!r:.200} without the function of the job, expected it and "
                "its arguments: beamjax.replay(folder, fn, *args)"
            )
        restaged = _Restaged(run.flat, run.options, run.values.values)
        yield restaged, _Known(error.failure, error.rounds, run.plan.shard_sizes)
        return
    parsed = parse_options(options)
    if not isinstance(failed, Job):
        failure = getattr(failed, "failure", None)
        known = _Known(failure, getattr(failed, "rounds", 0), {})
    else:
        known = _known_of(failed)
    call = flatten_call(fn, args)
    with contextlib.ExitStack() as files:
        if call.has_streams:
            call = files.enter_context(counted(call, LOCAL, parsed))
        yield _Restaged(call, parsed), known


def _error_of(job: Job) -> BaseException | None:
    if job.state is not JobState.FAILED:
        return None
    try:
        job.result()
    except Exception as error:
        return error
    return None


def _known_of(job: Job) -> _Known:
    """What the folder of a job says of it."""
    report, error = job.report(), _error_of(job)
    placements = report.plan["placements"] if report.plan is not None else ()
    keys = {cuts_key(placement["name"]) for placement in placements}
    cuts = {key: report.fingerprint[key] for key in keys.intersection(report.fingerprint)}
    return _Known(
        getattr(error, "failure", None),
        rounds=report.progress.rounds if error else 0,
        shard_sizes={place["name"]: place["shard_size"] for place in placements},
        sizes={place["name"]: place["members"] for place in placements},
        cuts=cuts if report.fingerprint else None,
    )


def _replay(
    restaged: _Restaged,
    known: _Known,
    member: int | None,
    shard: int | None,
    step: str | None,
    rounds: int | None,
) -> Any:
    planned, inputs = restaged.planned(known)
    plan, failure = planned.plan, known.failure
    for placement, n in plan.sizes.items():
        if known.sizes.get(placement, n) not in (n, None):
            raise JobError(
                f"replay: found {n} members of {placement!r}, expected the "
                f"{known.sizes[placement]} of the job; pass its function and arguments"
            )
    chosen, function = _chosen(planned, step or (failure.step if failure else ""))
    if rounds is None:
        rounds = known.rounds if failure is None or failure.step == chosen.name else 0
    members = _members(plan, chosen, failure, member, shard)
    run = _ReplayedPass(planned, inputs, chosen, values_before(
        plan, inputs, restaged.options, chosen.name, rounds))  # fmt: skip
    results = []
    for index in members:
        with _compat.callback_errors() as on_host:
            try:
                results.append(run(index, function))
            except Exception as error:
                raised = on_host[-1] if on_host else error
                rest = f", after {rounds} rounds" if rounds else ""
                raised.add_note(f"This was member {index} in the step {chosen.name!r}{rest}.")
                if raised is error:
                    raise
                raise raised from error
    return results if member is None else results[0]


def _chosen(planned: Planned, step: str) -> tuple[Map, str]:
    """The pass that `step` names, and the name of the function in it; "" for the last one."""
    stages = _stages(planned)
    passes = [
        choice
        for choice in plan_steps.walk(planned.plan.steps)
        if isinstance(choice, Map) and choice.name in stages and _maps(stages[choice.name])
    ]
    for choice in passes:
        if step in (choice.name, ""):
            return choice, ""
        if step in _functions(stages[choice.name]):
            return choice, step
    names = [name for choice in passes for name in (choice.name, *_functions(stages[choice.name]))]
    raise OptionsError(
        f"step: found {step!r}, expected a function that is mapped, or a step that maps one: "
        f"{listed(names)}{hint(step, names)}"
    )


def _members(
    plan: Plan, step: Map, failure: Failure | None, member: int | None, shard: int | None
) -> Iterable[int]:
    """The members to call the body for."""
    n, shards = plan.sizes[step.placement], plan.shards(step.placement)
    if member is not None:
        if not 0 <= member < n:
            raise OptionsError(f"member: found {member}, expected one from 0 to {n - 1}")
        return [member]
    if shard is not None:
        if not 0 <= shard < len(shards):
            last = len(shards) - 1
            raise OptionsError(f"shard: found {shard}, expected one from 0 to {last}")
        (only,) = shards.between(shard, shard + 1)
        return range(only.start, only.start + only.count)
    if failure is None or failure.members is None or failure.step != step.name:
        raise OptionsError(
            f"replay: no shard of {step.name!r} failed, expected member=... or shard=..."
        )
    return range(failure.members[0], failure.members[1] + 1)


class _ReplayedPass:
    """One pass, evaluated for single members."""

    def __init__(
        self, planned: Planned, inputs: Inputs, step: Map, values: Mapping[str, np.ndarray]
    ):
        plan, stage = planned.plan, _stages(planned)[step.name]
        together, single = _split(stage)
        # The step may have one operand more than the stage: the mask of dropped members.
        self._operands = step.operands[: len(stage.operands)]
        self._reader = inputs.reader()
        self._values = values
        self._served = [jnp.asarray(values[name]) for name in step.broadcasts]
        types = [plan.values[name] for name in (*step.broadcasts, *self._operands)]
        impls = [value.key_impl for value in types]
        self._shards = plan.shards(step.placement)
        # Members whose values depend on others of their shard are computed as on a worker.
        self._together = None
        if together.results:
            body = map_body(planned.placed, together, (), impls, None, self._shards.size)
            self._together = jax.jit(body)
        self._rows_of_shard = functools.lru_cache(maxsize=1)(self._computed)
        impls += [value_type(var.aval).key_impl for var in together.results]
        self._body = map_body(planned.placed, single, (), impls, None, 1)

    def __call__(self, member: int, function: str) -> Any:
        """What a function returns for a member; see `replay`."""
        rows = [jnp.asarray(x) for x in self._rows(member, member + 1)]
        if self._together is not None:
            index = self._shards.index_at(member)
            (shard,) = self._shards.between(index, index + 1)
            together = self._rows_of_shard(shard)
            rows += [x[member - shard.start :][:1] for x in together]
        start, count = np.int32(member), np.int32(1)
        with collecting() as returned:
            flat = self._body(jnp.asarray(start), jnp.asarray(count), *self._served, *rows)
        trees = [tree for name, tree in returned if function in ("", name)]
        return trees[-1] if trees else [x[0] for x in flat]

    def _computed(self, shard: Shard) -> list[jax.Array]:
        """The values of a shard that depend on several of its members."""
        assert self._together is not None
        last = shard.start + shard.count
        rows = [np.asarray(x) for x in self._rows(shard.start, last)]
        padding = self._shards.size - shard.count
        padded = [np.concatenate([x, *[x[-1:]] * padding]) for x in rows]
        return self._together(np.int32(shard.start), np.int32(shard.count), *self._served, *padded)

    def _rows(self, start: int, stop: int) -> list[np.ndarray]:
        """The operands of the pass for members [start, stop)."""
        return [
            self._values[name][start:stop]
            if name in self._values
            else self._reader.read([name], start, stop)[name]
            for name in self._operands
        ]


def _split(stage: MapStage) -> tuple[MapStage, MapStage]:
    """Divides a pass into what members of a shard compute together, and what each does alone."""
    # The second pass reads the results of the first. Bodies that both need are in both.
    needed: set[Var] = set()
    together: list[Emission] = []
    single: list[Emission] = []
    for emission in reversed(stage.emissions):
        eqn, rule = emission.eqn, emission.rule
        if isinstance(rule, ReductionRule):
            continue
        joins = rule.by_shard or not needed.isdisjoint(eqn.outputs)
        if joins:
            needed.update(atom for atom in eqn.inputs if isinstance(atom, Var))
            together.insert(0, emission)
        if eqn.primitive is map_p:
            single.insert(0, Emission(eqn, replace(rule, emit=_without_vmap)))
        elif not joins:
            single.insert(0, emission)
    axes = {
        var: axis
        for emission in together
        if isinstance(emission.rule, MemberwiseRule)
        for var, axis in zip(emission.eqn.outputs, emission.rule.out_axes, strict=True)
        if axis is not None
    }
    own = {var for emission in single for var in emission.eqn.outputs}
    read = {atom for emission in single for atom in emission.eqn.inputs if isinstance(atom, Var)}
    results = [var for var in axes if var in read - own]
    extra = [(var, MemberAxis(stage.placement, axes[var])) for var in results]
    return (
        replace(stage, emissions=together, results=results),
        replace(
            stage,
            emissions=single,
            operands=[*stage.operands, *extra],
            results=_maps(stage)[-1].outputs,
        ),
    )


def _without_vmap(eqn: Eqn, args: Sequence[Any], _: Any) -> list[Any]:
    """Calls a body for the one member of a shard."""
    served = eqn.params["num_broadcast"]
    member = [x[0] for x in args[served:]]
    return [x[None] for x in _compat.jaxpr_as_fun(eqn.params["jaxpr"])(*args[:served], *member)]


def _maps(stage: MapStage) -> list[Eqn]:
    """The equations of a pass that map a body."""
    return [e.eqn for e in stage.emissions if e.eqn.primitive is map_p]


def _functions(stage: MapStage) -> list[str]:
    """The names of the functions that a pass maps."""
    return [eqn.params["name"] for eqn in _maps(stage)]


def _stages(planned: Planned) -> dict[str, MapStage]:
    """The stages of passes by the names of their steps: lowering numbers them in this order."""
    counts: collections.Counter[str] = collections.Counter()
    by_step = {}
    for stage in walk(planned.stages):
        if isinstance(stage, MapStage):
            by_step[f"map_{stage.placement}_{counts[stage.placement]}"] = stage
            counts[stage.placement] += 1
    return by_step
