"""A program and options for Dataflow, and the mark of tests that need its packages."""

import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj

with_dataflow = pytest.mark.dataflow

L4 = "worker_accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
HINT = "accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
PLACE = {"project": "my-project", "region": "us-central1", "temp_location": "gs://bucket-x/t"}
IMAGE = {"sdk_container_image": "gcr.io/my-project/beamjax:1"}
GPU = {"machine_type": "g2-standard-4", "dataflow_service_options": L4, "require_platform": "gpu"}

N = 2000
X = np.random.default_rng(0).normal(size=(N, 300)).astype(np.float32)
W = np.ones((300, 300), np.float32)


@bj.program(clients=N)
def regression(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    mean = bj.reduce_mean(y)
    return bj.reduce_max(bj.map_fn(lambda u: u - mean, y)), mean
