"""Federated averaging under a budget: each round uses the clients with the highest gain per cost.

The devices of a round may take a limited number of seconds in total, and some are up to eight times
slower than others. The gain of a client is estimated from its losses when it last took part,
`digits * sqrt(mean(loss ** 2))` (F. Lai et al., "Oort: Efficient Federated Learning via Guided
Participant Selection", OSDI 2021). Clients are chosen in order of gain per cost as long as they fit
in the budget; a single client with a higher gain than all of these is chosen instead. So the gain
is at least half of the best one (S. Khuller, A. Moss and J. Naor, "The budgeted maximum coverage
problem", Information Processing Letters 70, 1999). `bj.take` reads only the chosen clients.

    python examples/budgeted_clients.py --rounds=12 --runner=DirectRunner
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import beamjax as bj

CLIENTS, CLASSES, STEPS, RATE = 60, 10, 10, 1.0
Client = dict[str, Any]  # images (digits, 64), labels (digits,), mask (digits,) of true digits


def losses(weights: jax.Array, client: Client) -> jax.Array:
    """The cross entropy of each digit; 0 for padding."""
    logits = jax.nn.log_softmax(client["images"] @ weights)
    picked = jnp.take_along_axis(logits, client["labels"][:, None], axis=1)[:, 0]
    return -picked * client["mask"]


@bj.program(placements={"clients": None})
def average(weights: jax.Array, clients: Client) -> tuple[jax.Array, jax.Array]:
    """The weights after a round, and the utility of each client that took part."""

    def one(client: Client) -> tuple[jax.Array, jax.Array, jax.Array]:
        digits = jnp.sum(client["mask"])
        loss = lambda w: jnp.sum(losses(w, client)) / digits
        step = lambda _, w: w - RATE * jax.grad(loss)(w)
        utility = digits * jnp.sqrt(jnp.sum(losses(weights, client) ** 2) / digits)
        return jax.lax.fori_loop(0, STEPS, step, weights), digits, utility

    local, digits, utility = bj.map_fn(one, clients)
    return bj.reduce_weighted_mean(local, digits), utility


def fitting(order: np.ndarray, cost: np.ndarray, budget: float) -> np.ndarray:
    """The clients that fit in the budget, if they are chosen in this order."""
    taken: list[int] = []
    for i in order:
        if cost[taken].sum() + cost[i] <= budget:
            taken.append(i)
    return np.sort(taken)


def greedy(gain: np.ndarray, cost: np.ndarray, budget: float) -> np.ndarray:
    """The clients with the highest gain per cost that fit, or the best single one."""
    taken = fitting(np.argsort(-gain / cost, kind="stable"), cost, budget)
    single = max(np.flatnonzero(cost <= budget), key=lambda i: gain[i])
    return taken if gain[taken].sum() >= gain[single] else np.array([single])


def digits_by_client(
    rng: np.random.Generator,
) -> tuple[Client, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Padded digits of each client; held-out digits; seconds per round on each client's device."""
    pixels, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images, labels = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    shares = rng.dirichlet(np.ones(CLIENTS))
    sizes = 3 + np.floor(shares * 1100).astype(int)
    starts, width = np.cumsum(sizes) - sizes, sizes.max()
    rows = starts[:, None] + np.minimum(np.arange(width), sizes[:, None] - 1)
    mask = (np.arange(width) < sizes[:, None]).astype(np.float32)
    clients = {"images": images[rows], "labels": labels[rows], "mask": mask}
    slowness = rng.choice([1, 2, 4, 8], CLIENTS) * 0.01  # seconds a digit
    return clients, (images[1300:], labels[1300:]), sizes * slowness


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Returns the accuracy on held-out digits after each round, for each way to choose clients."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--budget", type=float, default=4.0, help="device seconds of a round")
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    rng = np.random.default_rng(0)
    clients, (images, labels), cost = digits_by_client(rng)
    source, first_gain = bj.from_arrays(clients), clients["mask"].sum(axis=1)

    def rounds(choose: Callable[[np.ndarray], np.ndarray]) -> tuple[list[float], list[int]]:
        weights, gain, found, taken = jnp.zeros((64, CLASSES)), first_gain * 2.3, [], []
        for _ in range(flags.rounds):
            chosen = choose(gain)
            weights, utility = bj.run(
                average, weights, bj.take(source, chosen), runner=flags.runner, options=others
            )
            gain[chosen] = utility
            found.append(float(np.mean((images @ weights).argmax(axis=1) == labels)))
            taken.append(len(chosen))
        return found, taken

    ways = {
        "gain per cost": lambda gain: greedy(gain, cost, flags.budget),
        "at random": lambda gain: fitting(rng.permutation(CLIENTS), cost, flags.budget),
    }
    found = {}
    for name, choose in ways.items():
        found[name], taken = rounds(choose)
        print(f"{name:13} {np.mean(taken):.1f} clients a round, accuracy after each:")
        print("  " + " ".join(f"{accuracy:.1%}" for accuracy in found[name]))
    return found


if __name__ == "__main__":
    main()
