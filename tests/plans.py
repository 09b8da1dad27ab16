"""Plans made by hand, for tests of what runs them: no program has to be staged to them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.bodies.export import export_body
from beamjax.plan.steps import FusedBuffer, Input, Map, Output, Plan, Reduction, Server, ValueType
from beamjax.runtime.inputs import Inputs

SIZE = 8


class Maker:
    """Collects the values and bodies of a plan over one placement.

    A type is a dtype and a shape as text, with `@` at its end if the value is placed: `"f 3@"`.
    """

    def __init__(self, n, **types):
        self.n = n
        self.values = {name: value_type(text) for name, text in types.items()}
        self.bodies = {}

    def server(self, name, fn, inputs, outputs):
        """`outputs = fn(*inputs)`, by names in one string each."""
        inputs, outputs = tuple(inputs.split()), tuple(outputs.split())
        arguments = [self.argument(x) for x in inputs]
        body = lambda *args: as_tuple(fn(*args))
        return Server(name, self.export(name, body, arguments), inputs, outputs)

    def map(self, name, fn, broadcasts="", operands="", results="", sums=""):
        """A pass: `fn` of one member gives the results, and then what is summed over members."""
        broadcasts, operands = tuple(broadcasts.split()), tuple(operands.split())
        results, sums = tuple(results.split()), tuple(sums.split())

        def body(start, count, *args):
            real = jnp.arange(SIZE) < count
            axes = (*(None for _ in broadcasts), *(0 for _ in operands))
            if operands:
                outs = jax.vmap(lambda *a: as_tuple(fn(*a)), axes)(*args)
            else:
                outs = jax.vmap(lambda _: as_tuple(fn(*args)))(real)
            parts = [
                jnp.sum(x, axis=0, where=real.reshape(-1, *[1] * (x.ndim - 1))).reshape(-1)
                for x in outs[len(results) :]
            ]
            return [*outs[: len(results)], *parts]

        scalar = jax.ShapeDtypeStruct((), np.dtype("int32"))
        arguments = [scalar, scalar, *(self.argument(x) for x in broadcasts)]
        arguments += [self.argument(x, (SIZE,)) for x in operands]
        buffers = tuple(
            FusedBuffer("sum", v.dtype, size, (Reduction(x, "sum", v.dtype, 0, size),))
            for x in sums
            for v in [self.values[x]]
            for size in [int(np.prod(v.shape))]
        )
        key = self.export(name, body, arguments)
        functions = (f"{name}_body",)
        return Map(
            name, "clients", key, broadcasts, operands, results, buffers, functions, short_body=key
        )

    def plan(self, steps, outputs, inputs):
        """A plan with these outputs, by name, and inputs."""
        return Plan(
            name="by_hand",
            sizes={"clients": self.n},
            shard_sizes={"clients": SIZE},
            values=self.values,
            inputs=tuple(
                Input(name, None, name) if self.values[name].placement else Input(name, name, None)
                for name in inputs.split()
            ),
            steps=tuple(steps),
            outputs=tuple(Output(value=name) for name in outputs.split()),
            bodies=self.bodies,
            x64=False,
            jax_version=jax.__version__,
        )

    def argument(self, name, leading=()):
        value = self.values[name]
        return jax.ShapeDtypeStruct((*leading, *value.shape), np.dtype(value.dtype))

    def export(self, name, body, arguments):
        key, exported = export_body(name, body, arguments, ["cpu"])
        self.bodies[key] = exported
        return key


def as_tuple(outs):
    return outs if isinstance(outs, tuple) else (outs,)


def value_type(text):
    text, placed, _ = text.partition("@")
    dtype, *shape = text.split()
    dtype = {"f": "float32", "i": "int32", "b": "bool", "h": "bfloat16"}[dtype]
    return ValueType(tuple(map(int, shape)), dtype, None, "clients" if placed else None)


def inputs_of(plan, **arrays):
    """The inputs of a plan, by name."""
    return Inputs(plan, [arrays[spec.path] for spec in plan.inputs])


def renamed(plan, **changes):
    """The same plan with other fields."""
    return dataclasses.replace(plan, **changes)
