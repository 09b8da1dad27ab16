"""What is logged of errors on workers: all but that a job was cancelled, and noise of Beam."""

import logging
import threading

import grpc
import pytest
from apache_beam.utils.retry import with_exponential_backoff

from beamjax.errors import JobCancelledError, WorkerError
from beamjax.pipelines import log_filters


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


def test_threads_of_beam_do_not_report_closed_connections(monkeypatch):
    class Gone(grpc.RpcError):
        pass

    def fail(error):
        raise error

    shown = []
    monkeypatch.setattr(log_filters, "_show", lambda failed: shown.append(failed.exc_value))
    in_beam = lambda error: with_exponential_backoff(num_retries=0)(fail)(error)
    killed = "Worker subprocess exited with return code"
    for call, error, is_shown in (
        (in_beam, Gone(), False),
        (in_beam, RuntimeError(f"{killed} -9"), False),
        (in_beam, RuntimeError(f"{killed} 1"), True),
        (fail, Gone(), True),
    ):
        with pytest.raises(type(error)) as caught:
            call(error)
        failed = (type(error), error, caught.tb, None)
        log_filters._show_faults_of_threads(threading.ExceptHookArgs(failed))
        assert (error in shown) == is_shown
