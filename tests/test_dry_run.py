"""The job that Dataflow would be sent."""

import json
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.internal import pickler
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.utils import proto_utils
from cloud import GPU, HINT, IMAGE, L4, PLACE, N, W, X, regression, with_dataflow

import beamjax as bj
from beamjax import dataflow
from beamjax.errors import OptionsError
from beamjax.pipelines.combiners import FinishPieces
from beamjax.pipelines.dry_run import DryStore
from beamjax.pipelines.store import Store
from beamjax.pipelines.workers import MapShards


@pytest.fixture
def job(offline):
    return dataflow.dry_run(regression, W, X, options={**PLACE, **IMAGE, **GPU})


@with_dataflow
def test_the_machines_and_steps(job):
    environment = job.job["environment"]
    (pool,) = [p for p in environment["workerPools"] if p["kind"] == "harness"]
    assert pool["machineType"] == "g2-standard-4"
    images = {image["containerImage"] for image in pool["sdkHarnessContainerImages"]}
    assert images == {IMAGE["sdk_container_image"]}
    assert environment["serviceOptions"] == [L4]
    assert "no_use_multiple_sdk_containers" in environment["experiments"]
    assert "use_multiple_sdk_containers" not in environment["experiments"]
    assert hints(job) == [{}]  # an accelerator is asked for once
    assert environment["sdkPipelineOptions"]["options"]["save_main_session"] is False
    assert "packages" not in pool  # nothing is staged: all is in the image
    starts = ("map_clients_", "Write ", "ref_AppliedPTransform")
    assert {"map_clients_0", "map_clients_1"} <= {name.partition("/")[0] for name in job.steps}
    assert all(name.startswith(starts) for name in job.steps)


def hints(job):
    return [dict(e.resource_hints) for e in job.pipeline.components.environments.values()]


@with_dataflow
def test_hints_go_to_all_steps(offline):
    given = {**PLACE, **IMAGE, "require_platform": "gpu"}
    flags = [f"--{k}={v}" for k, v in given.items()]
    flags += [f"--resource_hint={HINT}", "--resource_hint=min_ram=16GB"]
    job = dataflow.dry_run(regression, W, X, options=flags)
    assert hints(job) == [
        {
            "beam:resources:accelerator:v1": HINT.removeprefix("accelerator=").encode(),
            "beam:resources:min_ram_bytes:v1": b"16000000000",
        }
    ]
    assert "serviceOptions" not in job.job["environment"]
    assert "no_use_multiple_sdk_containers" in job.job["environment"]["experiments"]


@with_dataflow
def test_what_is_big_is_in_files_and_nothing_is_secret(job):
    assert sum(job.files.values()) > X.nbytes + W.nbytes
    assert job.pipeline.ByteSize() < 1 << 20
    for transform in job.pipeline.components.transforms.values():
        assert len(transform.spec.payload) < 1 << 18
    told = json.dumps(job.job).encode() + job.pipeline.SerializeToString()
    found = functions(job)
    assert b"open-sesame" not in told + b"".join(map(cloudpickle.dumps, found))
    stores = [fn.task.store for fn in found if isinstance(fn, MapShards | FinishPieces)]
    assert len(stores) == 4
    # Workers read from the work folder; the store that wrote nothing stays here.
    assert {type(store) for store in stores} == {Store}
    assert {store.root for store in stores} == {"gs://bucket-x/t/beamjax/beamjax-dry-run"}


def functions(job):
    """The DoFns as a worker gets them."""
    payloads = [
        proto_utils.parse_Bytes(transform.spec.payload, beam_runner_api_pb2.ParDoPayload)
        for transform in job.pipeline.components.transforms.values()
        if transform.spec.urn == common_urns.primitives.PAR_DO.urn
    ]
    return [pickler.loads(payload.do_fn.payload)[0] for payload in payloads]


@with_dataflow
def test_bodies_and_callbacks_go_through_files(offline):
    table = np.random.default_rng(1).normal(size=(500, 300)).astype(np.float32)

    @bj.program(clients=N)
    def told(x):
        def body(v):
            jax.debug.callback(lambda _: None, v[0])
            return (jnp.asarray(table) @ v).sum()

        return bj.reduce_sum(bj.map_fn(body, x))

    job = dataflow.dry_run(told, X, options={**PLACE, **IMAGE})
    assert job.pipeline.ByteSize() < 1 << 20
    assert sum(job.files.values()) > X.nbytes + table.nbytes


@with_dataflow
def test_the_first_job_of_rounds(offline):
    @bj.program(clients=N)
    def rounds(w, x):
        def step(w, _):
            return w + bj.reduce_mean(bj.map_fn(lambda v: (v @ w).sum(), x)), None

        return jax.lax.scan(step, w, length=3)[0]

    job = dataflow.dry_run(rounds, W, X, options={**PLACE, **IMAGE, "rounds_per_graph": 2})
    assert any("[0]/map_clients" in name for name in job.steps)
    assert not any("[2]/map_clients" in name for name in job.steps)


@with_dataflow
def test_what_is_computed_here_alone_is_no_job(offline):
    with pytest.raises(OptionsError, match="nothing in it is computed on workers"):
        dataflow.dry_run(lambda x: x, X, options={**PLACE, **IMAGE})


# --- the store of a dry run


def test_a_dry_store_travels_as_a_plain_one(tmp_path):
    store = DryStore(str(tmp_path / "x"), lasts=False)
    ref = store.put([X], "members")
    assert store.written == dict(ref.files)
    assert not (tmp_path / "x").exists()
    again = pickle.loads(pickle.dumps(store))
    assert type(again) is Store
    assert again == Store(store.root, store.piece_bytes, store.lasts)
