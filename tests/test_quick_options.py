"""Beam's options with views that are made once: they say what Beam's own do."""

from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    StandardOptions,
    TypeOptions,
)

import beamjax as bj
from beamjax.pipelines import quick_options
from beamjax.pipelines.quick_options import QuickOptions

FLAGS = ["--direct_num_workers=3", "--streaming", "--label=a=b"]


def test_views_are_those_of_beam():
    ours, theirs = QuickOptions(FLAGS), PipelineOptions(FLAGS)
    for cls in (DirectOptions, StandardOptions, TypeOptions):
        view = ours.view_as(cls)
        assert ours.view_as(cls) is view
        assert type(view) is cls
        assert view.get_all_options() == theirs.view_as(cls).get_all_options()
    assert ours.get_all_options() == theirs.get_all_options()
    assert ours.display_data() == theirs.display_data()


def test_what_is_set_in_one_is_seen_in_all():
    options = QuickOptions(FLAGS)
    options.view_as(StandardOptions).runner = "Some"
    assert options.view_as(StandardOptions).runner == "Some"
    assert options.view_as(TypeOptions).view_as(StandardOptions).runner == "Some"
    assert options.get_all_options()["runner"] == "Some"


def test_a_run_parses_few(monkeypatch):
    import jax.numpy as jnp
    import numpy as np

    @bj.program(clients=4)
    def total(x):
        return bj.reduce_sum(bj.map_fn(jnp.sin, x))

    x, made = np.ones(4, np.float32), []
    real = PipelineOptions.view_as
    monkeypatch.setattr(
        PipelineOptions, "view_as", lambda self, cls: made.append(cls) or real(self, cls)
    )
    bj.run(total, x)
    ours = len(made)
    monkeypatch.setattr(quick_options.QuickOptions, "view_as", PipelineOptions.view_as)
    made.clear()
    bj.run(total, x)
    assert ours < len(made) / 2
