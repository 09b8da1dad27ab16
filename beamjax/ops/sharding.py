"""Lays out placed values on a mesh: the member axis along the mesh axis with the placement's name.

If the mesh axis has type Auto, placed values get sharding constraints that leave the other axes to
the compiler. If it has type Explicit, the layout is part of the type of a placed value.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from beamjax.errors import PlacementError

AnyMesh: TypeAlias = Mesh | AbstractMesh


def mesh_for(name: str, placement: str, n: Any, mesh: AnyMesh | None) -> AnyMesh | None:
    """The mesh along which an operator lays out members; None if it has no such axis."""
    active = active_mesh(placement, mesh)
    if active is None:
        return None
    uneven = isinstance(n, int) and n % active.shape[placement]
    if uneven and is_explicit(active, placement):
        raise PlacementError(
            f"{name}: placement {placement!r} has {n} members, which the mesh axis of that "
            f"name with explicit type and size {active.shape[placement]} does not divide. Make "
            f"the axis Auto, or its size a divisor of {n}."
        )
    return active


def active_mesh(placement: str, mesh: AnyMesh | None = None) -> AnyMesh | None:
    """Like `mesh_for`, but without its checks and errors."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return None if _axis_type(mesh, placement) in (None, AxisType.Manual) else mesh


def is_explicit(mesh: AnyMesh | None, placement: str) -> bool:
    """Whether the layout of members is part of their type."""
    return mesh is not None and _axis_type(mesh, placement) == AxisType.Explicit


def _axis_type(mesh: AnyMesh, placement: str) -> AxisType | None:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True)).get(placement)


def placed_aval(aval: Any, placement: str, n: Any, mesh: AnyMesh | None) -> Any:
    """The type of n members of type `aval`: the same, with the member axis in front."""
    spec = _without(placement, aval.sharding.spec)
    if mesh is not None and is_explicit(mesh, placement):
        sharding = NamedSharding(_abstract(mesh), P(placement, *spec))
    else:
        sharding = aval.sharding.update(spec=P(None, *aval.sharding.spec))
    return aval.update(shape=(n, *aval.shape), sharding=sharding)


def member_aval(aval: Any, placement: str) -> Any:
    """The type of one member of a placed value of type `aval`: the same without the first axis."""
    spec = P(*_without(placement, aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], sharding=aval.sharding.update(spec=spec))


def reduced_aval(aval: Any, dtype: Any, weak_type: bool) -> Any:
    """The type of a reduction over the first axis of `aval` with a result of type `dtype`."""
    sharding = aval.sharding.update(spec=P(*aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], dtype=dtype, weak_type=weak_type, sharding=sharding)


def lay_out(x: jax.Array, placement: str, mesh: AnyMesh | None, whole: bool = False) -> jax.Array:
    """Lays the first axis of `x` along the mesh axis `placement`, if there is a mesh."""
    if mesh is None:
        return x
    if is_explicit(mesh, placement):
        rest = _without(placement, jax.typeof(x).sharding.spec[1:])
        # `whole` keeps the first axis whole on each device instead.
        first = None if whole else placement
        return jax.sharding.reshard(x, NamedSharding(mesh, P(first, *rest)))
    if not isinstance(x, jax.core.Tracer) and x.shape[0] % mesh.shape[placement]:
        return x  # A compiled program pads uneven shards, an array can't.
    if not isinstance(x, jax.core.Tracer) and not isinstance(x.sharding, NamedSharding):
        mesh = mesh if isinstance(mesh, Mesh) else jax.sharding.get_mesh()
        return jax.device_put(x, NamedSharding(mesh, P(placement)))
    spec = P(placement, *[P.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def whole(x: jax.Array) -> jax.Array:
    """Reshards `x` so that each device has its whole first axis, if its type says otherwise."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=P(None, *sharding.spec[1:])))


def check_shared(x: jax.Array, placement: str, mesh: AnyMesh | None) -> None:
    """Checks that the members can share `x`, which the mapped function closes over."""
    spec = jax.typeof(x).sharding.spec
    if is_explicit(mesh, placement) and spec != P(*_without(placement, spec)):
        raise PlacementError(
            f"map_fn: the mapped function closes over a value of type {jax.typeof(x)}, which lies "
            f"along the mesh axis {placement!r} that the members take. Take it off that axis with "
            f"jax.sharding.reshard, or pass it through broadcast."
        )


def lay_out_like(x: jax.Array, aval: Any) -> jax.Array:
    """Gives `x` the layout in the type `aval`; a cotangent has the layout of its primal."""
    own = jax.typeof(x).sharding
    # The type of a NumPy array has no mesh.
    return (
        x
        if own.spec == aval.sharding.spec
        else jax.sharding.reshard(x, own.update(spec=aval.sharding.spec))
    )


def _without(placement: str, spec: Any) -> tuple[Any, ...]:
    """The partitions of an inner axis, none of which may use the mesh axis of the members."""
    names = lambda part: part if isinstance(part, tuple) else (part,)
    return tuple(None if placement in names(part) else part for part in spec)


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
