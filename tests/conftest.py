"""Settings for all tests: eight CPU devices, and no dtype or rank changes that nobody asked for."""

import os

_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import cluster_runners  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption(
        "--clusters", action="store_true",
        help="also run tests that start Prism, Flink and Spark: fetches and builds them once",
    )  # fmt: skip


def pytest_configure(config):
    if config.getoption("--clusters") and cluster_runners.sharing(config):
        raise pytest.UsageError("--clusters starts servers once a process; give -n0 with it")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--clusters"):
        return
    needing = [item for item in items if any(map(item.get_closest_marker, cluster_runners.NEEDS))]
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]


def pytest_terminal_summary(terminalreporter, config):
    for line in cluster_runners.summary(config):
        terminalreporter.write_line(line, yellow=True, bold=True)
