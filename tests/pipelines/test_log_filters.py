"""What is logged of errors on workers: all but that a job was cancelled, and noise of Beam."""

import logging

import beamjax.pipelines  # noqa: F401 - sets the filters
from beamjax.errors import JobCancelledError, WorkerError


def test_other_errors_of_workers_are_logged(caplog):
    for error in (JobCancelledError("the job was cancelled"), WorkerError("it failed")):
        for name in ("apache_beam.runners.common", "apache_beam.runners.worker.sdk_worker"):
            try:
                raise error
            except Exception as caught:
                logging.getLogger(name).exception(caught)
    logging.warning("apitools not found, and more")
    logging.warning("something else")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["it failed", "it failed", "something else"]
