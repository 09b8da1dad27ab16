"""The arguments that commands on a function share, and the options that go to beamjax and Beam."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from beamjax._beam_compat import add_flags
from beamjax._text import closest
from beamjax.errors import OptionsError
from beamjax.options import OWN, Options, parse_options
from beamjax.options.checks import CHOICES

VALUES = """\
TARGET and how a VALUE is read:
  file.py:function --arg x=VALUE   the function is called with these arguments
  file.py:job --rows=3             the function is called with these flags, JSON or else text, and
                                   returns (fn, *args): what to call. Use it for whatever a VALUE
                                   can't say
  3  0.1  true  null               a number, as in Python
  [[1, 2], [3, 4]]                 numbers in a list: an array; other JSON: a tree of such
  w.npy  w.npz                     an array; a tree: names in an .npz are paths, "layers/0/w"
  'parts/*.npy'                    members in several files, read by the workers; as
                                   .parquet .arrow .feather .zarr .tfrecord .array_record
  FOLDER                           of a result that was kept with --keep placed
An array goes to the workers by shards where the program uses it as a placed value. Workers read a
big .npy file that is used so themselves.
"""
EXIT_CODES = """\
exit codes: 0 done; 1 a run failed, or a result is past its tolerance; 2 the command line is wrong;
130 interrupted
"""


def add_call(parser: argparse.ArgumentParser, runner: bool = True) -> None:
    """The function, its arguments and the options of a run."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.usage = f"{parser.prog} TARGET [--arg NAME=VALUE ...] [options] [flags of Beam]"
    parser.epilog = f"{VALUES}\n{EXIT_CODES}"
    parser.add_argument(
        "target", metavar="TARGET", help="module:function or file.py:function; comes first"
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE",
        help="an argument of the function, by the name of its parameter",
    )  # fmt: skip
    if runner:
        parser.add_argument(
            "--runner", default="DirectRunner",
            help="'local' for this process, or a runner of Beam (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--traceback", action="store_true", help="show all frames of errors")
    group = parser.add_argument_group(
        "options of beamjax (see beamjax.Options), also with dashes; all others are Beam's"
    )
    for name, help in option_help().items():
        group.add_argument(f"--{name}", metavar=_metavar(name), help=help)
        if "_" in name:
            dashes = f"--{name.replace('_', '-')}"
            group.add_argument(dashes, dest=name, help=argparse.SUPPRESS)


def option_choices(name: str) -> list[str]:
    """What an option may be on a command line, if it is one of a few."""
    return [str(choice).lower() for choice in CHOICES.get(name, ()) if choice is not None]


def _metavar(name: str) -> str:
    choices = option_choices(name)
    return f"{{{','.join(choices)}}}" if choices else "X"


def option_help() -> dict[str, str]:
    """The first sentence on each option, from where they are documented."""
    _, _, attributes = (inspect.getdoc(Options) or "").partition("Attributes:\n")
    found = dict.fromkeys(OWN, "")
    for entry in re.split(r"\n  (?=\w)", f"\n{attributes}"):
        name, _, text = entry.strip().partition(": ")
        if name in found:
            sentence = re.split(r"(?<=[.;])\s", " ".join(text.split()))[0]
            found[name] = sentence.rstrip(".;").replace("%", "%%")
    return found


def options_of(arguments: argparse.Namespace) -> Options:
    """The options of a run, those of Beam checked for slips of the pen.

    Raises:
      OptionsError: an option has an impossible value, or is unknown.
    """
    own = [f"--{n}={getattr(arguments, n)}" for n in OWN if getattr(arguments, n) is not None]
    check_flags(arguments.flags, getattr(arguments, "runner", "local"))
    if not arguments.beam_flags:
        return parse_options([*own, *arguments.flags])
    from apache_beam.options.pipeline_options import PipelineOptions

    # Flags after the word `--` are not checked, nor is a PipelineOptions.
    unchecked = PipelineOptions([*arguments.flags, *arguments.beam_flags])
    return parse_options(replace(parse_options(own), beam=unchecked))


def check_flags(flags: Sequence[str], runner: str) -> None:
    """Raises OptionsError for words that belong to no flag, and for unknown flags.

    A runner on a server of its own may know flags that Beam's Python does not; of these, only what
    is nearly the name of a known flag is refused.

    Args:
      flags: what is left of a command line.
      runner: its name.
    """
    if not flags:
        return
    parser = _beam_parser()
    try:
        _, left = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise OptionsError(f"Beam does not take these flags: {error}") from None
    known = [*OWN, *_OF_COMMANDS, *(flag[2:] for flag in parser._option_string_actions)]
    elsewhere = runner not in ("local", "DirectRunner")
    value_of = ""
    for word in left:
        if not word.startswith("--"):
            if not value_of:
                raise OptionsError(
                    f"found {word!r}, which belongs to no flag; arguments of the function are "
                    "given as --arg name=VALUE"
                )
            value_of = ""
            continue
        name, equals, _ = word[2:].partition("=")
        value_of = "" if equals else name
        close = closest(name.replace("-", "_"), known)
        if close or not elsewhere:
            also = f"; did you mean --{close}?" if close else ""
            raise OptionsError(
                f"found --{name}, which is no option of beamjax, nor one of Beam{also}{_AFTER}"
            )
        print(f"beamjax: --{name} is handed to {runner} as it is", file=sys.stderr)


_OF_COMMANDS = ("arg", "runner", "json", "traceback", "out")
_AFTER = "\nWhat comes after a word `--` is handed to Beam unchecked."


class _Parser(argparse.ArgumentParser):
    """Takes what Beam's classes of options add, and raises instead of leaving the process."""

    def add_value_provider_argument(self, *names: str, **settings: object) -> None:
        self.add_argument(*names, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> None:  # type: ignore[override]
        raise argparse.ArgumentError(None, message)


def _beam_parser() -> argparse.ArgumentParser:
    import beamjax.pipelines.runners.cluster_options  # noqa: F401  (adds its own)

    parser = _Parser(allow_abbrev=False, add_help=False, conflict_handler="resolve")
    add_flags(parser)
    return parser
