"""Padding is counted: before a run from the lengths, in a run as it is read."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj

LENGTHS = np.array([1, 3, 8, 2, 9, 16, 16, 5, 0, 30, 32, 31], np.int64)
ROWS = {"x": np.ones((LENGTHS.sum(), 3), np.float32), "k": np.ones(LENGTHS.sum(), np.int8)}
ROW = 3 * 4 + 1 + 1  # and the mask
SHARD = 4


@bj.program(clients=None)
def total(w, data):
    def one(client, w):
        x = jnp.sum(client["x"] @ w, where=client["mask"])
        return x + jnp.sum(client["k"].astype("float32"), where=client["mask"])

    return bj.reduce_sum(bj.map_fn(one, (data, bj.broadcast(w))))


W = np.ones(3, np.float32)


def clients(**options):
    return bj.from_ragged(ROWS, LENGTHS, buckets=[8, 16, 32], **options)


def told(source, **options):
    text = str(bj.explain(total, W, source, options={"shard_size": 8, **options}))
    (line,) = re.findall("A pass reads .*", text)
    return line


def test_explain_tells_the_padding_of_a_pass(monkeypatch):
    monkeypatch.setattr("beamjax.padded_bytes.SCANNED", 8)  # more than one range of lengths
    shards = [LENGTHS[:8], LENGTHS[8:]]
    padded = sum(len(s) * b for s, b in zip(shards, [16, 32], strict=True))
    share = 1 - LENGTHS.sum() / padded
    line = told(clients())
    assert f"A pass reads {padded * ROW / 1024:.1f} KiB of them, {share:.1%} of which" in line
    assert f"for {LENGTHS.sum() * ROW / 1024:.1f} KiB of data" in line
    assert line.endswith("padded to: 1 of 16, 1 of 32.")
    text = str(bj.explain(total, W, clients(), options={"shard_size": 8}))
    assert "2 executables more than one for each pass, 3 at most" in text


def test_of_a_sample_only_those_who_are_taken_count():
    line = told(bj.take(clients(), [0, 1, 2, 3]))
    assert "padded to: 1 of 8." in line
    assert f"{1 - 14 / 32:.1%} of which is padding" in line


def test_members_that_can_only_be_padded_to_the_longest():
    @bj.program(clients=None)
    def by_length(data):
        return bj.reduce_sum(bj.map_fn(lambda c: c["x"], data))

    text = str(bj.explain(by_length, clients(), options={"shard_size": 8}))
    share = 1 - LENGTHS.sum() / (32 * len(LENGTHS))
    assert f"{share:.1%} of which is padding" in text
    assert "padded to: 2 of 32." in text


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_counts_what_it_reads_and_the_executables(runner):
    own = 5.0 if runner == "local" else 6.0  # so that nobody has compiled it

    @bj.program(clients=None)
    def scaled(data):
        one = lambda c: (
            jnp.sum(c["x"], where=c["mask"][:, None]) * own + jnp.sum(c["k"]).astype("float32")
        )
        return bj.reduce_sum(bj.map_fn(one, data))

    with bj.launch(scaled, clients(), runner=runner, options={"shard_size": 8}) as job:
        assert float(job.result()) == (3 * own + 1) * LENGTHS.sum()
        done = job.progress().done
    padded = 8 * 16 + 4 * 32
    assert done.bytes_read == padded * ROW
    assert done.bytes_padding == pytest.approx((padded - LENGTHS.sum()) * ROW, abs=8)
    assert done.executables >= 2  # for the buckets that there are; and to check a short one
    even = bj.from_arrays(np.ones((8, 3), np.float32))

    @bj.program(clients=None)
    def sums(x):
        return bj.reduce_sum(x)

    with bj.launch(sums, even, runner=runner) as job:
        job.result()
        assert job.progress().done.bytes_padding == 0
