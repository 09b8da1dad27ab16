"""Errors with long texts."""

import logging
import traceback

import jax
import numpy as np
import pytest

import beamjax as bj
from beamjax._text import MAX_CHARACTERS, cut


def fails(v):
    raise ValueError("begin of the text " + "y" * 2_000_000 + " and its end")


def on_shards(x):
    body = lambda v: jax.pure_callback(fails, v, v, vmap_method="sequential")
    return bj.reduce_sum(bj.map_fn(body, x))


def on_the_server(x):
    return jax.pure_callback(fails, x[0], bj.reduce_sum(x))


@pytest.mark.parametrize("fn", [on_shards, on_the_server])
@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_the_text_of_an_error_is_cut_once(fn, runner, tmp_path, capsys):
    program = bj.program(placements={"rows": None})(fn)
    options = {"job_folder": tmp_path / "job"}
    logging.getLogger("jax._src.callback").addHandler(handler := logging.StreamHandler())
    try:
        with pytest.raises(bj.WorkerError) as caught:
            bj.run(program, np.ones(8, np.float32), runner=runner, options=options)
    finally:
        logging.getLogger("jax._src.callback").removeHandler(handler)
    text = str(caught.value)
    assert len(text) < 1.1 * MAX_CHARACTERS
    assert "begin of the text" in text
    assert "and its end" in text
    assert text.count(" characters ...") == 1
    assert len("".join(traceback.format_exception(caught.value))) < 60_000
    assert len(capsys.readouterr().err) < 60_000
    with pytest.raises(bj.WorkerError, match="begin of the text") as stored:
        bj.open_job(tmp_path / "job").result()
    assert len(str(stored.value)) < 1.1 * MAX_CHARACTERS


def test_a_text_that_is_cut():
    text = "".join(f"{number:5}" for number in range(10_000))
    assert len(cut(text)) == MAX_CHARACTERS
    assert cut(cut(text)) == cut(text)
    assert cut(text).startswith("    0    1")
    assert cut(text).endswith(" 9998 9999")
    assert "... 40,000 characters ..." in cut(text)
    assert cut(text[:MAX_CHARACTERS]) == text[:MAX_CHARACTERS]
