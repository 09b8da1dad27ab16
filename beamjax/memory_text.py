"""What is told of memory, for people."""

from __future__ import annotations

from collections.abc import Mapping

from beamjax.fact_types import MemoryFact, human_bytes


def memory_rows(memory: MemoryFact) -> list[tuple[str, str, str]]:
    """Lines of a table: of each step and process, what it takes at most, and what for."""

    def row(name: str, parts: Mapping[str, int]) -> tuple[str, str, str]:
        largest = sorted(parts, key=lambda what: -parts[what])
        told = ", ".join(f"{what} {human_bytes(parts[what])}" for what in largest)
        return name, human_bytes(sum(parts.values())), told

    rows = [row("in any case", memory.kept)]
    rows += [row(f"for {name}", parts) for name, parts in memory.steps.items()]
    rows.append(("a worker process", human_bytes(memory.worker_bytes), "what is largest of these"))
    told = "the same process" if memory.shared else row("", memory.launcher)[2]
    return [*rows, ("the launching process", human_bytes(memory.launcher_bytes), told)]


def step_texts(memory: MemoryFact) -> dict[str, str]:
    """The same in short, by step."""
    return {
        name: f"memory up to {human_bytes(sum(parts.values()))}"
        for name, parts in memory.steps.items()
    }
