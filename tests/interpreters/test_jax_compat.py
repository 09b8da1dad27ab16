"""What `_compat` uses of JAX besides its public names is there, in the shape that it expects.

A case fails by its name when an upgrade of JAX removes or changes what it names.
"""

import importlib
import inspect
from collections.abc import Mapping, MutableMapping

import jax.extend.core
import pytest

from beamjax import _compat

pytestmark = pytest.mark.versions


def accepts(*names):
    """Expects a callable that takes these parameters by name."""

    def check(found):
        assert set(names) <= set(inspect.signature(found).parameters)

    return check


def takes(count):
    """Expects a callable that takes so many arguments by position."""

    def check(found):
        inspect.signature(found).bind(*range(count))

    return check


def has(*attributes):
    """Expects a value, or a class, with these attributes."""

    def check(found):
        assert not [name for name in attributes if not hasattr(found, name)]

    return check


def is_a(*kinds):
    """Expects a value of one of these types."""

    def check(found):
        assert isinstance(found, kinds)

    return check


def settable(found):
    """Expects a table to which rules are added; JAX 0.12 has one that is no mapping."""
    assert hasattr(found, "__setitem__")


USED = [
    ("jax._src.array:ArrayImpl", has("shape", "dtype", "weak_type")),
    ("jax._src.checkify:error_checks", is_a(MutableMapping)),
    ("jax._src.checkify:checkify_jaxpr", takes(4)),
    ("jax._src.core:trace_state_clean", takes(0)),
    ("jax._src.effects:ordered_effects.contains", takes(1)),
    ("jax._src.tree_util:_registry", is_a(Mapping)),
    ("jax._src.tree_util:_RegistryEntry", has("to_iter", "from_iter")),
    ("jax._src.xla_bridge:_backends", is_a(Mapping)),
    ("jax._src.interpreters.batching:to_elt_handlers", is_a(Mapping)),
    ("jax._src.interpreters.batching:from_elt_handlers", is_a(Mapping)),
    ("jax._src.interpreters.batching:is_vmappable", takes(1)),
    ("jax._src.interpreters.pxla:batched_device_put", takes(5)),
    ("jax._src.lib:xla_client.make_cpu_client", accepts("asynchronous", "num_devices")),
    ("jax._src.state.discharge:discharge_state", accepts("lower")),
    ("jax.experimental.checkify:Error.__dataclass_fields__", lambda found: {
        "_pred", "_code", "_payload"} <= set(found) or pytest.fail(str(sorted(found)))),
    ("jax._src.source_info_util:register_exclusion", takes(1)),
    ("jax.interpreters.ad:Zero", is_a(type)),
    ("jax.interpreters.ad:deflinear", takes(2)),
    ("jax.interpreters.ad:instantiate_zeros", takes(1)),
    ("jax.interpreters.ad:is_undefined_primal", takes(1)),
    ("jax.interpreters.ad:primitive_jvps", settable),
    ("jax.interpreters.ad:primitive_transposes", settable),
    ("jax.interpreters.batching:fancy_primitive_batchers", settable),
    ("jax.interpreters.batching:primitive_batchers", settable),
    ("jax.interpreters.mlir:lower_fun", accepts("fun", "multiple_results")),
    ("jax.interpreters.mlir:register_lowering", takes(2)),
    ("jax.interpreters.partial_eval:dce_jaxpr", takes(3)),
    ("jax.interpreters.partial_eval:dce_rules", settable),
    ("beamjax._compat:gensym", takes(0)),
    ("beamjax._compat:Primitive.get_bind_params", takes(2)),
    ("beamjax._compat:ClosedJaxpr", has("consts", "jaxpr")),
    ("beamjax._compat:jaxpr_as_fun", takes(1)),
    ("beamjax._compat:jaxprs_in_params", takes(1)),
    ("beamjax._compat:subjaxprs", takes(1)),
    ("jax._src.pjit:jit_p", has("bind")),
    ("jax._src.random.threefry2x32:threefry2x32_p", has("bind")),
    ("jaxlib.version:__version__", is_a(str)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "check"), USED, ids=[path for path, _ in USED])
def test_jax_still_has_it(path, check):
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name)
    check(found)


def test_names_are_those_of_jax_extend():
    theirs = {name for name in vars(jax.extend.core) if not name.startswith("_")}
    names = [name for name in vars(_compat) if name in theirs]
    assert {"ClosedJaxpr", "Jaxpr", "Literal", "Primitive", "gensym"} <= {*names}
    assert [n for n in names if getattr(_compat, n) is not getattr(jax.extend.core, n)] == []
