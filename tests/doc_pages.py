"""The pages of docs/ as sessions: their blocks of code, in order, and what these print.

- A block of `python` is run, in the namespace of its page and a folder of its own. One that begins
  with the comment `# name.py` is written to that file instead, and can be imported.
- A block of `sh` is lines of `beamjax ...`, which are called in this process.
- A block of `text` after either is what it prints. A line of `...` in it stands for any
  lines, ` ...` at the end of a line for the rest of it.
- `<!-- numbers vary -->` before a block of text: its numbers need not be the same, nor whether bits
  are equal or differ.
- `<!-- not run: REASON -->` before a block: it is shown only.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from beamjax.commands import cli

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUN = ("python", "sh")

_BLOCK = re.compile(
    r"^(?: *<!-- (?:not run: (?P<reason>[^\n]*?)|(?P<marker>[^\n]*?)) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
_VARYING = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d*)*(?:e[-+]?\d+)?|\b(?:equal|differ)\b")


def _shown_name(page: Path) -> str:
    inside = page.is_relative_to(DOCS.parent)
    return page.relative_to(DOCS.parent).as_posix() if inside else page.name


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is that of its fence, `not_run` why it is shown only."""

    page: Path
    line: int
    language: str
    text: str
    marker: str
    not_run: str | None

    @property
    def where(self) -> str:
        return f"{_shown_name(self.page)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("indent")) + 1
        code = re.sub(f"^{match['indent']}", "", match["text"], flags=re.M)
        found.append(
            Block(page, line, match["language"], code, match["marker"] or "", match["reason"])
        )
    return found


def same(shown: str, printed: str, vary: bool) -> bool:
    """Whether a block of text shows what was printed."""

    def plain(line: str) -> str:
        return " ".join(_VARYING.sub("#", line).split()) if vary else line.rstrip()

    def pattern(line: str) -> str:
        if line == "...":
            return r"(?:.*\n)*?"
        return re.escape(line).removesuffix(r"\ \.\.\.") + (
            ".*\n" if line.endswith(" ...") else "\n"
        )

    lines = [plain(line) for line in shown.strip("\n").splitlines()]
    found = [plain(line) for line in printed.strip("\n").splitlines()]
    text = "".join(f"{line}\n" for line in found)
    return re.fullmatch("".join(map(pattern, lines)), text) is not None


def run_page(page: Path, folder: Path) -> None:
    """Runs the blocks of a page in a folder, which is the current one."""
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module
    printed = None
    try:
        for block in blocks(page):
            if block.not_run is not None:
                printed = None
            elif block.language in RUN:
                printed = _printed(block, folder, module)
            elif block.language == "text" and printed is not None:
                vary = block.marker == "numbers vary"
                message = f"{block.where}: it printed\n{printed}"
                assert same(block.text, printed, vary), message
                printed = None
    finally:
        del sys.modules[module.__name__]


def _printed(block: Block, folder: Path, module: types.ModuleType) -> str:
    """What a block prints."""
    with contextlib.ExitStack() as stack:
        # As users have them; the tests are stricter.
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if block.language == "sh":
            for command in _commands(block):
                assert cli.main(command[1:]) == 0, f"{block.where}: {shlex.join(command)} failed"
        elif named := re.match(r"# ([\w/]+\.py)\n", block.text):
            (folder / named.group(1)).write_text(block.text, encoding="utf-8")
        else:
            # As many lines before it as in the page, so that errors name the line there.
            page = _shown_name(block.page)
            exec(compile("\n" * block.line + block.text, page, "exec"), module.__dict__)
    return out.getvalue()


def _commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        command = shlex.split(re.sub(r"(^|\s)# .*", "", line))
        if command:
            assert command[0] == "beamjax", f"{block.where}: can't run {line!r} here"
            yield command
