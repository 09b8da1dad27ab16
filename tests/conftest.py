"""Settings for all tests: eight CPU devices, and no dtype or rank changes that nobody asked for."""

import concurrent.futures
import contextlib
import gc
import multiprocessing
import os
import platform
import shutil
import signal
import socket
from pathlib import Path

_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import browser  # noqa: E402
import cluster_runners  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The time of an example says more of what else the machine does. In CI the examples are the same
# each time: a failure there can be had again, and new ones are looked for elsewhere.
_SLOW = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("tests", **_SLOW)
hypothesis.settings.register_profile("ci", **_SLOW, derandomize=True)
hypothesis.settings.register_profile("nightly", **_SLOW, derandomize=True, max_examples=500)
hypothesis.settings.load_profile("tests")

gc.set_threshold(20_000, 20, 20)  # At Python's own thresholds it takes a tenth of the time.

MAX_CACHED = 2**30
"""Bytes of compiled functions above which the cache of the tests is cleared."""


def _cache_compiled(config):
    """Compiles once what several workers run, and what the next run of the tests runs again.

    The cache is outside of the tree, so that a fresh clone finds what another one compiled.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "beamjax-tests" / f"compiled-{platform.node()}-{jax.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    first = not hasattr(config, "workerinput")
    if first and sum(file.stat().st_size for file in folder.iterdir()) > MAX_CACHED:
        shutil.rmtree(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish():
    """Keeps the garbage collector from all that was imported."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Compiles large tables without optimizations, in half of the time."""
    table = item.get_closest_marker("table") is not None
    if jax.config.read("jax_disable_most_optimizations") != table:
        from beamjax.storage import shared_cache

        shared_cache.reset()  # Worker processes compile with optimizations, to other last bits.
        jax.config.update("jax_disable_most_optimizations", table)


@pytest.fixture(scope="session")
def started():
    """Gives runners that are servers by their names; each is started once."""
    with contextlib.ExitStack() as stack:
        yield cluster_runners.starter(stack)
        from beamjax.pipelines.clusters import job_servers

        job_servers.stop_all()


def pytest_addoption(parser):
    parser.addoption(
        "--clusters", action="store_true",
        help="also run tests that start Prism, Flink and Spark: fetches and builds them once",
    )  # fmt: skip


def pytest_configure(config):
    if config.getoption("--clusters") and cluster_runners.sharing(config):
        raise pytest.UsageError("--clusters starts servers once a process; give -n0 with it")
    _cache_compiled(config)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--clusters"):
        return
    needing = [item for item in items if any(map(item.get_closest_marker, cluster_runners.NEEDS))]
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]


def pytest_terminal_summary(terminalreporter, config):
    for line in cluster_runners.summary(config):
        terminalreporter.write_line(line, yellow=True, bold=True)
    if "browser" in config.option.markexpr.split() and browser.missing():
        line = f"Pages in a browser: NOT TESTED, for want of {browser.missing()}"
        terminalreporter.write_line(line, yellow=True, bold=True)


@pytest.fixture(autouse=True)
def interruptible():
    """Tests and their processes take interrupts, also in the background of a shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def other_process():
    """Calls functions of test modules in another process, which is started once and has no JAX yet.

    `other_process(fn, *args)` returns what `fn(*args)` returns there, or raises what it raises.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result(timeout=300)


@pytest.fixture
def offline(monkeypatch):
    """Fails whatever looks for the network."""

    def refuse(*args, **kwargs):
        raise OSError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("A_SECRET", "open-sesame")
