"""The run that `faults.py` kills: rounds of local SGD, called in a process of its own."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

MEMBERS, FEATURES, ROWS, ROUNDS, SHARD = 64, 128, 256, 6, 8


def training_round(steps: int) -> Any:
    """A round of local SGD: server state, state of each client, exact reductions."""
    import jax
    import jax.numpy as jnp

    import beamjax as bj

    def train(w: Any, momentum: Any, x: Any, y: Any) -> Any:
        def step(_: Any, state: Any) -> Any:
            w, momentum = state
            momentum = 0.9 * momentum + x.T @ (x @ w - y) / ROWS
            return w - 1e-4 * momentum, momentum

        new, momentum = jax.lax.fori_loop(0, steps, step, (w, momentum))
        return new - w, momentum, jnp.mean((x @ new - y) ** 2)

    @bj.program(placements={"clients": MEMBERS})
    def one_round(w: Any, momentum: Any, x: Any, y: Any) -> Any:
        moves, momentum, loss = bj.map_fn(train, (bj.broadcast(w), momentum, x, y))
        losses = bj.reduce_mean(loss), bj.reduce_max(loss)
        return w + bj.reduce_mean(moves), momentum, losses

    return one_round


def training(steps: int) -> Any:
    """Rounds of local SGD as one function."""
    import jax

    one_round = training_round(steps)

    def rounds(w: Any, momentum: Any, x: Any, y: Any) -> Any:
        def body(state: Any, _: Any) -> Any:
            w, momentum, losses = one_round(*state, x, y)
            return (w, momentum), losses

        return jax.lax.scan(body, (w, momentum), None, length=ROUNDS)

    return rounds


def arguments() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((MEMBERS, ROWS, FEATURES), np.float32)
    y = rng.standard_normal((MEMBERS, ROWS), np.float32)
    return np.zeros(FEATURES, np.float32), np.zeros((MEMBERS, FEATURES), np.float32), x, y


def launch(steps: int, runner: str, options: dict[str, Any]) -> None:
    """What a killed launcher is: one call of `run`; tells on stdout how it ended."""
    import jax

    import beamjax as bj
    from beamjax.errors import BeamjaxError

    rounds = training(steps)
    print(json.dumps({"begins": True}), flush=True)
    try:
        found = bj.run(
            rounds, *arguments(), runner=runner, options={"shard_size": SHARD, **options}
        )
    except BeamjaxError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
    told: dict[str, Any] = {"bits": digest.hexdigest()}
    if runner == "local":
        by_jit = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(rounds)(*arguments()))]
        pairs = zip(leaves, by_jit, strict=True)
        told["differs"] = max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)
    print(json.dumps(told))
