"""The call that a command line asks for: a function, its arguments, and the options of the run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from beamjax._text import hint, listed
from beamjax.commands.answers import FLAGS, Answer, answers
from beamjax.errors import OptionsError
from beamjax.options import OWN, RULES, Options, parse_options, split_flags, summaries
from beamjax.pipelines.runners.runner_table import NAMES

EXPECTED = "module:function or file.py:function"
MAP_BYTES = 16 * 2**20
"""Smallest .npy file, in bytes, that workers read themselves if it is only used as placed."""

HELP = """\b
TARGET is one of
  file.py:function --arg x=VALUE   a function, which is called with these arguments
  file.py:job --rows=3             a job: job(rows=3) returns (fn, *args), the function
                                   to call and its arguments, for arguments that no
                                   VALUE describes; a flag is JSON, or else text,
                                   and fits the annotation of its parameter
  module:function, module:job      likewise

\b
VALUE is one of
  3  0.1  true  null               JSON: a number, a boolean, None
  [[1, 2], [3, 4]]                 JSON: a list of numbers is an array, and other
                                   lists and objects are trees
  w.npy                            an array
  w.npz                            a tree of arrays by paths such as "layers/0/w"
  'parts/*.npy'                    members in several files, which workers read; also
                                   .parquet .arrow .feather .zarr .tfrecord
  FOLDER                           a result that a run with --keep placed wrote

Flags that are not listed below are passed to Beam. So is everything after `--`, without a check.

\b
exit codes: 0 success; 1 the run failed, or a result is outside its tolerance;
2 wrong command line; 130 interrupted
"""


class _CallCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses a command line up to a word `--`; Beam gets the rest without a check."""
        cut = args.index("--") if "--" in args else len(args)
        extra = super().parse_args(ctx, args[:cut])
        ctx.params |= {"argv": [ctx.info_name, *args], "unchecked": args[cut + 1 :]}
        return extra


def call_command(work: Callable[..., Answer]) -> click.Command:
    """Makes a command with the parameters TARGET, its arguments and the options of a run."""

    # `work` takes the `Invocation` and the parameters of its own; its docstring is the help.
    @functools.wraps(work, updated=())
    def with_call(**params: Any) -> Answer:
        return work(make_call(params), **params)

    callback: Any = answers(with_call)
    callback.__click_params__ += getattr(work, "__click_params__", [])
    make = click.command(
        cls=_CallCommand,
        help=f"{inspect.getdoc(work)}\n\n{HELP}",
        params=_parameters(),
        # --shard-size means --shard_size, as options are named in `beamjax.Options`.
        context_settings={
            "ignore_unknown_options": True,
            "token_normalize_func": lambda name: name.replace("-", "_"),
        },
    )
    return make(callback)


def parsed(command: click.Command, argv: Sequence[str]) -> dict[str, Any]:
    """The parameters of a command line, for the function that the command wraps."""
    values = command.make_context(argv[0], list(argv[1:])).params
    return {name: value for name, value in values.items() if name not in FLAGS}


def _parameters() -> list[click.Parameter]:
    arg = "An argument of the function, by the name of its parameter."
    parameters: list[click.Parameter] = [
        click.Argument(["target"], type=click.Path()),
        click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF BEAM]..."),
        click.Option(["--arg"], multiple=True, metavar="NAME=VALUE", help=arg),
    ]
    for name, rule in RULES.items():
        kind: Any = click.Path() if rule.is_path else str
        settings: dict[str, Any] = {"type": kind, "metavar": "PATH" if rule.is_path else "X"}
        if rule.choices:
            settings = {"type": click.Choice(rule.choices)}
        parameters.append(click.Option([f"--{name}"], help=summaries()[name], **settings))
    return parameters


def runner_option(**settings: Any) -> Callable[[Any], Any]:
    """The flag `--runner`: the name of any runner; shells complete known ones."""
    offered = lambda ctx, param, typed: [
        name for name in ("local", *NAMES) if name.startswith(typed)
    ]
    return click.option("--runner", metavar="NAME", shell_complete=offered, **settings)


@dataclass(frozen=True)
class Invocation:
    """A function of programs, or a job that returns one, and the options of its run."""

    target: Callable[..., Any]
    texts: dict[str, str] | None  # of its arguments, by parameter; None for a job
    flags: dict[str, Any]  # the values of the parameters of a job
    options: Options
    argv: list[str]  # the command line

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Reads the arguments, or calls the job; returns the function and arguments of a run."""
        from beamjax.commands.cli_values import read_value

        if self.texts is None:
            call = self.target(**self.flags)
            if isinstance(call, tuple) and call and callable(call[0]):
                return call[0], call[1:]
            raise OptionsError(
                f"{_name(self.target)}: without --arg, it was called as a job, and it returned "
                f"{call!r:.80}; expected a tuple of a function and its arguments"
            )
        values = {name: read_value(text, f"--arg {name}") for name, text in self.texts.items()}
        bound = inspect.signature(self.target).bind_partial(**values)
        fn = self.target
        if bound.kwargs:
            fn = _by_position(fn, len(bound.args), list(bound.kwargs))
        return fn, (*bound.args, *bound.kwargs.values())

    def load_for_workers(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As `load`, but a large .npy file is a source if it is only used as a placed value."""
        import beamjax
        from beamjax.interpreters.planning import plan_for
        from beamjax.interpreters.staging.arguments import flatten_call

        fn, args = self.load()
        big = {id(value): i for i, value in enumerate(args) if _is_big_file(value)}
        if not big or any(isinstance(value, beamjax.StreamSource) for value in args):
            return fn, args
        values, call = list(args), flatten_call(fn, args)
        inputs = plan_for(call, self.options).plan.inputs
        for argument, spec in zip(call.arguments, inputs, strict=False):
            number = big.get(id(argument.value))
            placed = spec.placed is not None or spec.views
            if number is not None and placed and spec.server is None and spec.axis == 0:
                values[number] = beamjax.from_npy(argument.value.filename)
        return fn, tuple(values)


@dataclass(frozen=True)
class Command:
    """A command line, in words after `beamjax`, and the folder in which it was started."""

    argv: tuple[str, ...]
    cwd: str


def make_call(params: dict[str, Any]) -> Invocation:
    """Takes the call out of the parameters of a command, and checks it."""
    # With `--arg`, TARGET is the function of the call. Otherwise it is a job: a function with a
    # flag for each parameter, which returns a function and its arguments.
    names = list(params)
    own = {name: value for name in OWN if (value := params.pop(name)) is not None}
    target, texts, beam = params.pop("target"), _pairs(params.pop("arg")), params.pop("rest")
    argv, unchecked = params.pop("argv"), params.pop("unchecked")
    if target.startswith("-"):
        raise OptionsError(f"found {target!r} as TARGET, which comes before the flags of Beam")
    fn = find_target(target)
    parameters = {} if texts else dict(inspect.signature(fn).parameters)
    flags, beam = _split_flags(beam, parameters)
    if beam:
        from beamjax.pipelines.runners.unknown_flags import check_flags

        check_flags(beam, params["runner"], [*names, *parameters])
    _check_parameters(fn, texts or flags, is_job=not texts)
    if unchecked:
        from apache_beam.options.pipeline_options import PipelineOptions

        beam = PipelineOptions([*beam, *unchecked])
    options = replace(parse_options(own), beam=beam)
    return Invocation(fn, texts or None, flags, options, argv)


# --- parameters


def _name(fn: Callable[..., Any]) -> str:
    from beamjax.ops.leaves import name_of

    return name_of(fn)


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionsError(f"--arg {text}: expected name=value")
        if name in values:
            raise OptionsError(f"--arg {name}: found twice: {values[name]!r} and {value!r}")
        values[name] = value
    return values


def _split_flags(
    words: Sequence[str], parameters: Mapping[str, inspect.Parameter]
) -> tuple[dict[str, Any], Any]:
    """Splits words into the values of flags for parameters of a job, and flags for Beam."""
    values: dict[str, Any] = {}
    beam: list[str] = []
    for flag, text, taken in split_flags(words):
        if not flag:
            raise OptionsError(
                f"found {text!r}, which belongs to no flag; give arguments of the function as "
                "--arg name=VALUE"
            )
        name = flag.replace("-", "_")
        if name in parameters:
            values[name] = flag_value(parameters[name], text)
        else:
            beam += taken
    return values, tuple(beam)


def flag_value(parameter: inspect.Parameter, text: str) -> Any:
    """The value of a flag of a job: JSON, or else the text itself."""
    # An annotation is text in a module with `from __future__ import annotations`.
    kind = str(getattr(parameter.annotation, "__name__", parameter.annotation))
    if parameter.annotation is parameter.empty:
        kind = type(parameter.default).__name__
        kind = "float" if kind == "int" else kind  # 0.5 may well take the place of 1
    elif kind == "str":
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text or True
    expected, types = _KINDS.get(kind, ("", (type(value),)))
    if type(value) not in types:
        raise OptionsError(f"--{parameter.name}: found {text!r}, expected {expected}")
    return value


_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("an integer", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
}
"""Types of parameters of jobs: what messages call them, and the types of JSON values that fit."""


def _check_parameters(fn: Callable[..., Any], arguments: dict[str, Any], is_job: bool) -> None:
    """Raises OptionsError for names that are no parameters, and for parameters without a value."""
    parameters = inspect.signature(fn).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    text = f"{_name(fn)}({', '.join(names)})"
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in arguments:
        if name not in names and not takes_more:
            raise OptionsError(
                f"--arg {name}: there is no such parameter in {text}{hint(name, names)}"
            )
    required = [p.name for p in parameters if p.name in names and p.default is p.empty]
    if missing := [name for name in required if name not in arguments]:
        add = " ".join(f"--arg {name}=..." for name in missing)
        if is_job:
            flags = " ".join(f"--{name}=..." for name in missing)
            add += f"; or {flags}, if it returns a function and its arguments"
        raise OptionsError(f"{text}: add {add}")


def _by_position(fn: Callable[..., Any], count: int, names: Sequence[str]) -> Callable[..., Any]:
    """Wraps a function, to be called with `count` positional arguments and these names' values."""

    @functools.wraps(fn, updated=())
    def call(*values: Any) -> Any:
        return fn(*values[:count], **dict(zip(names, values[count:], strict=True)))

    call.__name__ = _name(fn)
    return call


def _is_big_file(value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.memmap) and value.nbytes >= MAP_BYTES and value.ndim > 0


# --- TARGET


def find_target(text: str) -> Callable[..., Any]:
    """Imports a module, or a file as one, and returns the function that the text names in it."""
    # The folder of a file, or the current one for a module, is put on `sys.path`, as `python` does.
    # Functions of a file travel to workers by value, as those of a script do.
    where, _, attributes = text.partition(":")
    target: Any = _load_file(where) if where.endswith(".py") or os.sep in where else _import(where)
    for name in attributes.split("."):
        names = functions_of(target)
        if not callable(getattr(target, name, None)):
            there = type(getattr(target, name)).__name__ if hasattr(target, name) else repr(name)
            raise OptionsError(
                f"{text}: found {there if name else 'no name'} after the colon, expected "
                f"{EXPECTED}; functions there: {listed(names)}{hint(name, names)}"
            )
        target = getattr(target, name)
    return target


def functions_of(holder: Any) -> list[str]:
    """Names of the public functions that a module defines, or if there are none, of its imports."""
    names = [n for n in dir(holder) if not n.startswith("_") and callable(getattr(holder, n))]
    home = getattr(holder, "__name__", None)
    return [n for n in names if getattr(getattr(holder, n), "__module__", "") == home] or names


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ModuleNotFoundError(name=name)
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module was found, but not a module that it imports
        files = [path.stem for path in Path().glob("*.py")]
        raise OptionsError(
            f"{name}: found no such module, expected {EXPECTED}{hint(name, files)}"
        ) from None
    is_here = os.path.dirname(os.path.abspath(getattr(module, "__file__", None) or "/")) == here
    return _by_value(module) if is_here else module


def _load_file(where: str) -> ModuleType:
    path = Path(where).absolute()
    if not path.is_file():
        names = [str(Path(where).with_name(other.name)) for other in path.parent.glob("*.py")]
        raise OptionsError(f"{where}: found no such file{hint(where, names)}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # The module has its own name, unless that is the name of another module.
    same = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    name = path.stem if same and same.origin == str(path) else f"_beamjax_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionsError(f"{where}: found no Python file, expected {EXPECTED}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _by_value(module)


def _by_value(module: ModuleType) -> ModuleType:
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module
