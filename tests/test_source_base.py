"""Sources of one's own, specs, and the sharing of live sources within a process."""

import json
import pickle

import jax
import numpy as np
import pytest

from beamjax.errors import SourceError
from beamjax.sources import from_arrays, live_sources
from beamjax.sources.source_base import LeafSpec, Source, open_spec


class _Squares(Source, kind="test-squares"):
    """Member i is i squared: the smallest source of one's own."""

    def __init__(self, size):
        self.size = size

    leaves = (LeafSpec((), np.dtype(np.int64)),)

    def __len__(self):
        return self.size

    def read(self, start, stop):
        self.check_range(start, stop)
        return [np.arange(start, stop) ** 2]

    def to_spec(self):
        return {**self.spec_head(), "size": self.size}

    @classmethod
    def from_spec(cls, spec):
        return cls(spec["size"])


def test_a_source_of_ones_own():
    source = pickle.loads(pickle.dumps(_Squares(5)))
    assert source.read(2, 4)[0].tolist() == [4, 9]
    assert source.describe() == "5 members of int64[] (40 bytes) test-squares"
    assert source.treedef == jax.tree.structure((0,))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "odd"}, r"source of kind 'odd' \(module None\) is unknown in process \d+"),
        ({"kind": "odd", "module": "__main__"}, "'odd' .*module that the workers can import"),
        ({"kind": "odd", "module": "json"}, "'odd' .* is unknown"),
        ({"kind": "odd", "module": "no_such"}, "cannot import its module 'no_such' .*install it"),
        ({"kind": "npy"}, r"'npy': found the spec .*to_spec does not give \(KeyError: 'leaves'\)"),
        ({"kind": "npy", "leaves": 3, "files": [], "size": 1}, "'npy': found the spec .*TypeError"),
        (
            {"kind": "npy", "leaves": [], "files": ["a"], "size": 1, "stamps": None},
            "1 files for 0 leaves",
        ),
        (
            {"kind": "npy", "leaves": [], "files": [], "size": 1, "stamps": None},
            "0 files for 0 leaves, expected one",
        ),
        ({"kind": "live", "token": "gone"}, "source gone: not registered in process"),
        ({"kind": "live"}, "source None: not registered"),
        ({"kind": ["npy"]}, r"source of kind \"\['npy'\]\""),
        ("npy", "source of kind 'None'"),
    ],
)
def test_open_spec_refuses(spec, message):
    with pytest.raises(SourceError, match=message):
        open_spec(spec)


def test_live_sources_are_shared_until_release():
    source = from_arrays(np.zeros(3))
    token = live_sources.register(source)
    assert live_sources.lookup(token) is source
    assert open_spec(json.loads(json.dumps(live_sources.live_spec(token)))) is source
    live_sources.release(token)
    live_sources.release(token)
    with pytest.raises(SourceError, match=rf"source {token}: .*process.*source.spill\(folder\)"):
        live_sources.lookup(token)
