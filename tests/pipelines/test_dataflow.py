"""Dataflow without Google's service: options, sources that workers there must reach, and jobs."""

import json
import pickle
import tempfile
from importlib.util import find_spec

import apache_beam as beam
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import requests
from apache_beam.internal import pickler
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
)
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineRunner
from apache_beam.utils import proto_utils
from memory_files import FILES, InMemory
from streams import Numbers, stream

import beamjax as bj
from beamjax import dataflow
from beamjax.errors import OptionsError, SourceError, StagingError
from beamjax.options import parse_options
from beamjax.pipelines.clusters.dataflow_options import prepare
from beamjax.pipelines.dry_run import DryStore
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.map_shards import MapShards
from beamjax.pipelines.worker.tasks import ServerFn
from beamjax.storage import files, remote_files

with_dataflow = pytest.mark.dataflow

L4 = "worker_accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
HINT = "accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
PLACE = {"project": "my-project", "region": "us-central1", "temp_location": "gs://bucket-x/t"}
IMAGE = {"sdk_container_image": "gcr.io/my-project/beamjax:1"}
GPU = {"machine_type": "g2-standard-4", "dataflow_service_options": L4, "platforms": ["cuda"]}

N = 2000
X = np.random.default_rng(0).normal(size=(N, 300)).astype(np.float32)
W = np.ones((300, 300), np.float32)


@bj.program(clients=N)
def regression(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    mean = bj.reduce_mean(y)
    return bj.reduce_max(bj.map_fn(lambda u: u - mean, y)), mean


FAKE = {**PLACE, **IMAGE, "no_auth": True}
NUMBERS = np.arange(11, dtype=np.float32)


def prepared(**given):
    parsed = parse_options(given)
    return prepare(parsed, PipelineOptions(list(parsed.beam)))


def experiments(flags):
    return flags.view_as(DebugOptions).experiments or []


# --- options


def test_options_that_are_enough():
    options, flags = prepared(**PLACE, **IMAGE)
    assert options.work_folder == "gs://bucket-x/t/beamjax"
    assert flags.view_as(SetupOptions).save_main_session is False
    assert flags.view_as(SetupOptions).sdk_location == "container"
    assert experiments(flags) == []


def test_the_flags_of_the_user_stay_as_they_are():
    given = PipelineOptions(
        [f"--{name}={value}" for name, value in {**PLACE, **IMAGE}.items()]
        + [f"--dataflow_service_options={L4}"]
    )
    _, flags = prepare(parse_options({"platforms": ["cuda"]}), given)
    assert experiments(flags) == ["no_use_multiple_sdk_containers"]
    assert experiments(given) == []
    assert given.view_as(SetupOptions).sdk_location == "default"


def test_options_that_cannot_work():
    for given, message in (
        *(({name: None}, f"DataflowRunner needs {name}; found none") for name in PLACE),
        ({"work_folder": "/tmp/x"}, "work_folder: found '/tmp/x', expected a folder that workers"),
        ({"work_folder": "s3://x/y"}, "work_folder: found 's3://x/y'"),
        ({"temp_location": "/tmp/x"}, "work_folder: found '/tmp/x/beamjax'"),
        ({"sdk_container_image": None}, "sdk_container_image: found none, expected an image with"),
        ({"dry_run": "True"}, "dry_run: a dry run has no results.*beamjax.dataflow.dry_run"),
        (
            {**GPU, "resource_hint": HINT},
            "found dataflow_service_options .* and resource_hint .*, expected one of them",
        ),
        (
            {**GPU, "platforms": None},
            r"exported for cpu alone; add options={'platforms': \['cuda'\]}",
        ),
    ):
        options = {key: v for key, v in {**PLACE, **IMAGE, **given}.items() if v is not None}
        with pytest.raises(OptionsError, match=message):
            prepared(**options)


def test_one_process_owns_an_accelerator():
    for given, one in (
        ({"dataflow_service_options": L4}, True),
        ({"resource_hint": HINT}, True),
        ({"dataflow_service_options": f"{L4};use_nvidia_mps"}, False),
        ({"resource_hint": "min_ram=16GB"}, False),
    ):
        _, flags = prepared(**PLACE, **IMAGE, **given, platforms=["cuda"])
        assert ("no_use_multiple_sdk_containers" in experiments(flags)) == one, given


def test_a_package_may_take_the_place_of_an_image():
    _, flags = prepared(**PLACE, requirements_file="requirements.txt")
    assert flags.view_as(SetupOptions).sdk_location == "default"


@pytest.mark.skipif(find_spec("apitools") is not None, reason="beamjax[dataflow] is installed")
def test_missing_packages_are_named():
    with pytest.raises(OptionsError, match=r"run pip install -e '\.\[dataflow\]'"):
        bj.run(regression, W, X, runner="DataflowRunner", options={**PLACE, **IMAGE})


@with_dataflow
def test_a_run_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(Store, "temporary", lambda *_: pytest.fail("a store was made"))
    options = {**PLACE, **IMAGE, "work_folder": "/tmp/x"}
    for runner in ("DataflowRunner", "dataflow"):
        with pytest.raises(OptionsError, match="work_folder: found '/tmp/x'"):
            bj.run(regression, W, X, runner=runner, options=options)


@with_dataflow
@pytest.mark.parametrize("file", [None, "none.json", "bad.json"])
def test_a_run_without_credentials_says_so_at_once(file, offline, tmp_path, monkeypatch):
    """Beam would try without any, for minutes."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "NO_GCE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")  # nobody listens there
    (tmp_path / "bad.json").write_text("{}")
    if file is not None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / file))
    asked = []
    post = requests.Session.request
    monkeypatch.setattr(
        requests.Session, "request", lambda *a, **k: [asked.append(k), post(*a, **k)][1]
    )
    monkeypatch.setattr(Store, "temporary", lambda *_: pytest.fail("a store was made"))
    match = r"found no credentials of Google Cloud .*gcloud auth application-default login"
    for call in (bj.run, lambda *a, **k: bj.launch(*a, **k).result()):
        with pytest.raises(OptionsError, match=match):
            call(regression, W, X, runner="DataflowRunner", options={**PLACE, **IMAGE})
    assert len(asked) == (0 if file else 2)  # the metadata server, once


def test_the_error_of_a_run_is_not_hidden_by_one_of_its_end(bucket, monkeypatch):
    def fail(self, *args, **kwargs):
        raise OSError("no connection")

    monkeypatch.setattr(InMemory, "pipe_file", fail)
    monkeypatch.setattr(InMemory, "ls", fail)
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(SourceError, match=r"cannot write .*no connection") as caught:
        bj.run(regression, W, X, runner=DataflowRunner(), options=FAKE)
    assert ["cannot remove stored values" in note for note in caught.value.__notes__] == [True]


def test_a_transform_is_refused_too():
    pipeline = beam.Pipeline(FnApiRunner(), options=PipelineOptions([]))
    pipeline.runner = DataflowRunner()
    with pytest.raises(OptionsError, match=r"work_folder: found .*/beamjax'"):
        pipeline | bj.transform(regression, W, X)


# --- sources of unknown length


class DataflowRunner(PipelineRunner):
    """Workers on other machines, which do not see the memory of this one; by its name."""

    def run_pipeline(self, pipeline, options):
        return FnApiRunner().run_pipeline(pipeline, PipelineOptions([]))


@pytest.fixture
def bucket(offline, monkeypatch):
    """gs:// in the memory of this process: what is in it, in the end, and was ever."""
    ever = []
    pipe = InMemory.pipe_file
    monkeypatch.setattr(InMemory, "pipe_file", lambda *a: [ever.append(a[1]), pipe(*a)][1])
    real = remote_files._system
    system = InMemory(skip_instance_cache=True)
    monkeypatch.setattr(
        remote_files, "_system", lambda path: system if path.startswith("gs://") else real(path)
    )
    monkeypatch.setattr(remote_files, "missing", lambda path: None)
    # With the packages of Google it asks the service, and again and again.
    asks = "_warn_if_soft_delete_policy_enabled"
    monkeypatch.setattr(GoogleCloudOptions, asks, lambda *_: None, raising=False)
    FILES.clear()
    return ever


def centred(x):
    return bj.reduce_max(bj.map_fn(lambda v, m: v - m, (x, bj.broadcast(bj.reduce_mean(x)))))


@pytest.mark.parametrize("make", [lambda: Numbers([5, 0, 6]), lambda: stream(NUMBERS)])
def test_streams_go_to_workers_by_the_bucket(make, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = bj.program(clients=None)(centred)
    found = bj.run(program, make(), runner=DataflowRunner(), options=FAKE)
    np.testing.assert_array_equal(found, bj.run(program, NUMBERS, runner="local"))
    assert any(path.endswith((".members", ".npy")) for path in bucket)
    assert all(path.startswith("gs://bucket-x/t/beamjax/") for path in bucket)
    assert FILES == {}
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_not_read_for_a_folder_that_workers_do_not_reach(bucket):
    program = bj.program(clients=None)(centred)
    options = {**PLACE, **IMAGE, "work_folder": "/tmp/x"}
    source = bj.from_chunks(lambda: pytest.fail("it was read"), np.float32(0))
    with pytest.raises(OptionsError, match="work_folder: found '/tmp/x'"):
        bj.run(program, source, runner=DataflowRunner(), options=options)
    assert not bucket


def test_no_job_of_a_stream_that_a_run_counts_before():
    program = bj.program(clients=None)(centred)
    with pytest.raises(StagingError, match="dry_run: found a source of unknown length"):
        dataflow.dry_run(program, stream(NUMBERS), options={**PLACE, **IMAGE})


# --- the job that Dataflow would be sent


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
    given = {**PLACE, **IMAGE, "platforms": ["cuda"]}
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
    stores = [fn.task.store for fn in found if isinstance(fn, MapShards | ServerFn)]
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
def test_one_job_serves_all_rounds(offline):
    @bj.program(clients=N)
    def rounds(w, x):
        def step(w):
            return w + bj.reduce_mean(bj.map_fn(lambda v: (v @ w).sum(), x))

        return jax.lax.while_loop(lambda w: w.sum() < 9, step, w)

    job = dataflow.dry_run(rounds, W, X, options={**PLACE, **IMAGE})
    assert "ServeTasks" in str(job.steps)


@with_dataflow
def test_what_is_computed_here_alone_is_no_job(offline):
    with pytest.raises(OptionsError, match="nothing in it is computed on workers"):
        dataflow.dry_run(lambda x: x, X, options={**PLACE, **IMAGE})


# --- the store of a dry run


def test_a_dry_store_travels_as_a_plain_one(tmp_path):
    store = DryStore(str(tmp_path / "x"), persistent=False)
    ref = store.put([X], "members")
    assert store.written == dict(ref.files)
    assert not (tmp_path / "x").exists()
    again = pickle.loads(pickle.dumps(store))
    assert type(again) is Store
    assert again == Store(store.root, store.piece_bytes, store.persistent)
