"""What is told of memory, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import MemoryFact

Row: TypeAlias = tuple[str, str, str]


def memory_sections(memory: MemoryFact) -> Iterator[tuple[str, list[Row]]]:
    """Titles and lines of tables: what each step and process takes at most, and what for; then the
    same of the devices of a worker.
    """
    rows = _rows(memory.kept, memory.steps)
    rows.append(("a worker process", human_bytes(memory.worker_bytes), "what is largest of these"))
    told = "the same process" if memory.shared else _row("", memory.launcher)[2]
    rows.append(("the launching process", human_bytes(memory.launcher_bytes), told))
    yield f"memory at most, {memory.where}", rows
    for device in memory.devices:
        rows = _rows(device.kept, device.steps)
        rows.append(("a device", human_bytes(device.nbytes), "what is largest of these"))
        left_out = "without what the driver and its libraries take, or JAX reserves"
        rows.append(("made from", "", f"{device.made_from}; {left_out}"))
        yield f"memory of a device, {device.platform}, about", rows


def _rows(kept: Mapping[str, int], steps: Mapping[str, Mapping[str, int]]) -> list[Row]:
    rows = [_row("in any case", kept)] if kept else []
    return [*rows, *(_row(f"for {name}", parts) for name, parts in steps.items())]


def _row(name: str, parts: Mapping[str, int]) -> Row:
    largest = sorted(parts, key=lambda what: -parts[what])
    told = ", ".join(f"{what} {human_bytes(parts[what])}" for what in largest)
    return name, human_bytes(sum(parts.values())), told


def step_texts(memory: MemoryFact) -> dict[str, str]:
    """The same in short, by step."""
    return {
        name: f"memory up to {human_bytes(sum(parts.values()))}"
        for name, parts in memory.steps.items()
    }
