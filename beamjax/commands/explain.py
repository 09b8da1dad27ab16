"""`beamjax explain`: what a function becomes, without running it."""

from __future__ import annotations

import argparse

from beamjax.commands.answers import Answer, give
from beamjax.commands.arguments import flags
from beamjax.errors import OptionsError, SourceError

takes_flags = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `beamjax explain`."""
    flags.add_call(parser)
    parser.add_argument(
        "--stage", default="plan",
        help="plan, or how it came to be: staged, flat, placed, graph (default: plan)",
    )  # fmt: skip
    parser.add_argument("--mermaid", action="store_true", help="a Mermaid flowchart of the steps")
    parser.add_argument("--html", metavar="FILE", help="write the graph of the steps to a page")
    parser.add_argument(
        "--save", metavar="FILE", help="write shard sizes and loops to a file, for --plan of a run"
    )


def command(arguments: argparse.Namespace) -> int:
    """Prints the plan, or another stage."""
    return give(arguments, lambda: _explain(arguments))


def _explain(arguments: argparse.Namespace) -> Answer:
    from beamjax.commands.arguments.binding import find_call, with_files
    from beamjax.explanation import explain

    options, make_call = find_call(arguments)
    call = make_call()
    if arguments.stage == "plan":
        call = with_files(call, options)
    found = explain(
        call.fn, *call.args, stage=arguments.stage, runner=arguments.runner, options=options
    )
    if arguments.html:
        try:
            found.save(arguments.html)
        except SourceError as error:
            raise OptionsError(f"--html {error}") from error
    if arguments.save:
        found.save_choices(arguments.save)
    data: dict[str, object] = {"stage": found.stage}
    data |= {"text": found.text} if found.facts is None else {"plan": found.to_json()}
    if arguments.mermaid:
        return Answer({**data, "mermaid": found.to_mermaid()}, found.to_mermaid())
    text = f"written to {arguments.html}" if arguments.html else found.text
    return Answer(data, text)
