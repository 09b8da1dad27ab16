"""Options of a run on Dataflow, and whether its packages are here."""

import pytest

try:
    from apache_beam.runners.dataflow.internal import apiclient  # noqa: F401

    INSTALLED = True
except ImportError:
    INSTALLED = False
with_dataflow = pytest.mark.skipif(
    not INSTALLED, reason="DATAFLOW IS NOT TESTED: pip install 'beamjax[dataflow]'"
)

L4 = "worker_accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
HINT = "accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
PLACE = {"project": "my-project", "region": "us-central1", "temp_location": "gs://bucket-x/t"}
IMAGE = {"sdk_container_image": "gcr.io/my-project/beamjax:1"}
GPU = {"machine_type": "g2-standard-4", "dataflow_service_options": L4, "require_platform": "gpu"}
