"""The price of an Asian option by Monte Carlo: a billion paths, and no input data.

A member is a path. Its index is folded into the key, so the same paths are drawn on every runner
and by any number of workers. One program computes the price and its derivatives by the spot price
and by the volatility ("delta" and "vega"): the derivative of the whole program, pass by pass.

    python examples/monte_carlo.py --paths=1_000_000 --runner=DirectRunner

Other flags go to beamjax (--shard_size=65536) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import beamjax as bj

DAYS, RATE, STRIKE, YEARS = 4, 0.03, 100.0, 1.0
MARKET = {"spot": 100.0, "volatility": 0.2}

Market = dict[str, jax.Array]


@bj.program(placements={"paths": None})
def price(market: Market, key: jax.Array, path: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of the discounted payoffs, and the mean of their squares."""

    def payoff(number: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.fold_in(key, number), (DAYS,))
        volatility, day = market["volatility"], YEARS / DAYS
        steps = (RATE - volatility**2 / 2) * day + volatility * math.sqrt(day) * noise
        prices = market["spot"] * jnp.exp(jnp.cumsum(steps))
        # The mean over the days is geometric, for which there is a formula to compare with.
        mean = jnp.exp(jnp.mean(jnp.log(prices)))
        return math.exp(-RATE * YEARS) * jnp.maximum(mean - STRIKE, 0)

    values = bj.map_fn(payoff, path)
    return bj.reduce_mean(values), bj.reduce_mean(values**2)


def formula(spot: float, volatility: float) -> float:
    """The exact price for an average over DAYS days (A. Kemna and A. Vorst, 1990)."""
    m, day = DAYS, YEARS / DAYS
    mean = math.log(spot) + (RATE - volatility**2 / 2) * day * (m + 1) / 2
    deviation = volatility * math.sqrt(day * (m + 1) * (2 * m + 1) / (6 * m))
    d = (mean - math.log(STRIKE) + deviation**2) / deviation
    forward = math.exp(mean + deviation**2 / 2)
    return math.exp(-RATE * YEARS) * (forward * normal(d) - STRIKE * normal(d - deviation))


def normal(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def slope(name: str, step: float = 1e-4) -> float:
    """The derivative of the formula by one of its arguments."""
    up, down = (formula(**MARKET | {name: MARKET[name] + s}) for s in (step, -step))
    return (up - down) / (2 * step)


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    """Prints and returns the estimates and the exact values, by name."""
    parser = argparse.ArgumentParser(description="An Asian option.", allow_abbrev=False)
    parser.add_argument("--paths", type=int, default=1_000_000)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    parser.add_argument(
        "--slopes", action="store_true", help="of the price, in spot and volatility"
    )
    flags, others = parser.parse_known_args(argv)
    beam = {"runner": flags.runner, "options": others}
    market = {name: jnp.float32(value) for name, value in MARKET.items()}
    given = market, jax.random.key(0), bj.from_range(flags.paths)

    began = time.perf_counter()
    estimates = {}
    if flags.slopes:
        gradient = jax.value_and_grad(price, has_aux=True)
        (mean, square), slopes = bj.run(gradient, *given, **beam)
        estimates = {f"slope in {name}": (float(slopes[name]), slope(name)) for name in MARKET}
    else:
        mean, square = bj.run(price, *given, **beam)
    seconds = time.perf_counter() - began
    estimates = {"price": (float(mean), formula(**MARKET)), **estimates}

    error = math.sqrt((float(square) - float(mean) ** 2) / flags.paths)
    print(f"{flags.paths:,} paths on {flags.runner} in {seconds:.1f} s")
    print(f"standard error of the price: {error:.5f}")
    for name, (estimate, expected) in estimates.items():
        print(f"{name:20} {estimate:9.4f}   by the formula {expected:9.4f}")
    return estimates


if __name__ == "__main__":
    main()
