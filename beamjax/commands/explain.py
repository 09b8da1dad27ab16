"""`beamjax explain`: what a function becomes, without running it."""

from __future__ import annotations

import argparse
from pathlib import Path

from beamjax.commands import flags
from beamjax.commands.answers import Answer, give
from beamjax.errors import OptionsError

takes_flags = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax explain`."""
    flags.add_call(parser)
    parser.add_argument(
        "--stage", default="plan",
        help="plan, or how it came to be: staged, flat, placed, graph (default: plan)",
    )  # fmt: skip
    parser.add_argument("--mermaid", action="store_true", help="a Mermaid flowchart of the steps")
    parser.add_argument("--html", metavar="FILE", help="write what notebooks show to a file")
    parser.add_argument(
        "--save", metavar="FILE", help="write shard sizes and loops to a file, for --plan of a run"
    )


def command(arguments: argparse.Namespace) -> int:
    """Prints the plan, or another stage."""
    return give(arguments, lambda: _explain(arguments))


def _explain(arguments: argparse.Namespace) -> Answer:
    options = flags.options_of(arguments)
    from beamjax.commands.arguments import find_call, with_files
    from beamjax.explanation import explain

    call = find_call(arguments.target, arguments.arg, arguments.static, arguments.factory)
    if arguments.stage == "plan":
        call = with_files(call, options)
    found = explain(
        call.fn, *call.args, stage=arguments.stage, runner=arguments.runner, options=options
    )
    if arguments.html:
        try:
            Path(arguments.html).write_text(found._repr_html_(), encoding="utf-8")
        except OSError as error:
            raise OptionsError(f"--html {arguments.html}: cannot write it ({error})") from error
    if arguments.save:
        found.save(arguments.save)
    data: dict[str, object] = {"stage": found.stage}
    data |= {"text": found.text} if found.facts is None else {"plan": found.to_json()}
    if arguments.mermaid:
        return Answer({**data, "mermaid": found.to_mermaid()}, found.to_mermaid())
    text = f"written to {arguments.html}" if arguments.html else found.text
    return Answer(data, text)
