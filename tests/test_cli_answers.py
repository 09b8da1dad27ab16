"""What commands say at their end."""

import argparse
import json
import math
import warnings

import jax
import numpy as np
import pytest

from beamjax.commands import answers
from beamjax.commands.answers import Answer, give
from beamjax.errors import Failure, JobCancelledError, OptionsError, WorkerError

JSON, TEXT = argparse.Namespace(json=True), argparse.Namespace(json=False)


def failing(error):
    def work():
        raise error

    return work


def test_an_answer_as_text_or_json(capsys):
    def work():
        print("by the program")
        warnings.showwarning(UserWarning("careful"), UserWarning, "file", 1)
        return Answer({"numbers": (1, math.nan, [math.inf])}, "the answer", 1)

    with pytest.warns(UserWarning, match="careful"):
        assert give(TEXT, work) == 1
    assert capsys.readouterr().out == "by the program\nthe answer\n"
    with pytest.warns(UserWarning, match="careful"):
        assert give(JSON, work) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out, parse_constant=pytest.fail)
    assert found == {"ok": False, "numbers": [1, "nan", ["inf"]], "warnings": ["careful"]}
    assert "by the program" in captured.err


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (OptionsError("no such option"), 2, "beamjax: no such option\n"),
        (WorkerError("it broke"), 1, "beamjax: it broke\n"),
        (JobCancelledError("cancelled"), 1, "beamjax: cancelled\n"),
        (KeyboardInterrupt(), 130, "beamjax: interrupted\n"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ],
)
def test_errors(error, status, told, capsys):
    assert give(TEXT, failing(error)) == status
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
    assert give(JSON, failing(error)) == status
    found = json.loads(capsys.readouterr().out)["error"]
    assert (found["type"], found["message"]) == (type(error).__name__, str(error))


def test_what_is_known_of_a_failure_on_a_worker(capsys):
    error = WorkerError("it broke")
    error.failure = Failure("map_0", 3, (24, 31), "here")
    error.add_note("The folder is kept")
    give(JSON, failing(error))
    captured = capsys.readouterr()
    found = json.loads(captured.out)["error"]
    assert found["failure"]["step"] == "map_0"
    assert found["failure"]["members"] == [24, 31]
    assert found["notes"] == ["The folder is kept"]
    assert captured.err == "beamjax: it broke\nThe folder is kept\n"


def users(x):
    return np.linalg.inv(x) + jax.numpy.ones(3) @ jax.numpy.ones(4)


def test_frames_of_the_user_alone():
    def error_of(fn):
        try:
            fn()
        except Exception as error:
            return "".join(answers.users_frames(error))

    told = error_of(lambda: jax.jit(users)(np.eye(3, dtype="float32")))
    assert "test_cli_answers.py" in told
    assert "return np.linalg.inv(x)" in told
    assert "/jax/" not in told
    assert "removed its internal frames" not in told

    def caused():
        try:
            jax.numpy.ones(3) @ jax.numpy.ones(4)
        except TypeError as error:
            raise ValueError("mine") from error

    told = error_of(caused)
    assert "ValueError: mine" in told
    assert "direct cause" in told
    assert "/jax/" not in told


def test_all_frames(capsys):
    arguments = argparse.Namespace(json=False, traceback=True)
    assert give(arguments, failing(OptionsError("no"))) == 2
    told = capsys.readouterr().err
    assert "answers.py" in told
    assert "beamjax.errors.OptionsError: no" in told
