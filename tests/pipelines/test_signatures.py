"""The signatures of DoFns that Beam is given are those that it would find."""

import types

import pytest
from apache_beam.transforms import core, userstate

from beamjax.pipelines.worker.map_shards import MapShards, Ranges
from beamjax.pipelines.worker.tasks import ServerFn


def changed():
    """A class with other parameters of a method than the class above it."""

    class Changed(Ranges):
        def process(self, element, *more, window=core.DoFn.WindowParam):
            yield element

        @classmethod
        def made(cls, count=3):
            return cls(count, 1)

    return Changed


@pytest.mark.parametrize("kind", [MapShards, Ranges, ServerFn, None])
def test_it_is_what_beam_would_find(kind):
    fn, names = object.__new__(kind or changed()), []
    for name in dir(fn):
        method = getattr(fn, name, None)
        if isinstance(method, types.MethodType):
            names.append(name)
            assert core.get_function_arguments(fn, name) == core.get_function_args_defaults(method)
    assert {"process", "setup", "finish_bundle"} <= set(names)
    assert not [name for name in names if name.startswith("_inspect_")]


def test_beam_asks_there(monkeypatch):
    asked, kinds = [], [Ranges, changed()]
    real = core.get_function_args_defaults
    monkeypatch.setattr(core, "get_function_args_defaults", lambda f: asked.append(f) or real(f))
    for kind in kinds:
        userstate.validate_stateful_dofn(kind(1, 1))
    assert not asked
    # What a caller changes is its own.
    fn = Ranges(1, 1)
    core.get_function_arguments(fn, "process")[0].append("more")
    assert core.get_function_arguments(fn, "process") == (["element"], [])
