"""What is left of a shard of which some members can't be read or computed.

Members that are left out are found by halves, and computed again without them: those that count
take the places of the others, so that bodies see nothing of what failed, and whatever was tried
before, what comes out depends only on who is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.errors import JobCancelledError, WorkerError
from beamjax.plan.dropping import MAX_MESSAGE, Dropped, hole_of
from beamjax.plan.steps import Map, ValueType
from beamjax.sources.padding import padded_rows

Call = Callable[[np.ndarray, np.ndarray], list[np.ndarray]]
"""Calls a body: with places in the shard whose members are computed, and which of them count."""


@dataclass(frozen=True)
class Computed:
    """What came out of a shard.

    Attributes:
      results: the placed results, (count, ...) each.
      partials: a vector for each lane, then a list of arrays for each combine; None for a combine
        if nobody is left.
      left_out: how many members are not in the partials.
      dropped: those of them that were in the shards of all passes before.
    """

    results: list[np.ndarray]
    partials: list[Any]
    left_out: int = 0
    dropped: tuple[Dropped, ...] = ()


def compute_rest(
    step: Map, start: int, kept: np.ndarray, lost: Mapping[int, str], call: Call
) -> tuple[list[np.ndarray] | None, np.ndarray, tuple[Dropped, ...]]:
    """Computes the members of a shard that can be computed.

    Args:
      step: a pass with a guard.
      start: the first member of the shard.
      kept: bool[count], False for members that were dropped before.
      lost: why members could not be read, by their place in the shard.
      call: computes the shard, and gives what the body does.

    Returns:
      What the body gave, without flags of finite members, or None if nobody is left; who is left;
      and who was dropped.

    Raises:
      Exception: what `call` raises, unless it can be put down to members that may be dropped.
      WorkerError: members give NaN or infinity, and the guard says so.
    """
    guard = step.guard
    assert guard is not None
    reasons = {k: ("error", text) for k, text in lost.items() if kept[k]}
    kept = kept.copy()
    kept[list(lost)] = False
    outs = None
    while kept.any():
        try:
            outs = call(*_stand_ins(kept))
        except JobCancelledError:
            raise
        except Exception:
            failed = failing(kept, call) if guard.on_error == "drop" else {}
            if not failed:
                raise
            reasons |= {k: ("error", text) for k, text in failed.items()}
            kept[list(failed)] = False
            outs = None
            continue
        if guard.on_nonfinite == "keep":
            break
        *outs, finite = outs
        wild = np.flatnonzero(kept & ~finite[: len(kept)])
        if not len(wild):
            break
        found = "found NaN or infinity in a value that is reduced, gathered or returned"
        if guard.on_nonfinite == "raise":
            members = ", ".join(str(start + k) for k in wild[:8])
            more = f" and {len(wild) - 8} more" if len(wild) > 8 else ""
            raise WorkerError(
                f"member {members}{more}: {found}, expected finite numbers (option "
                "on_nonfinite='raise')"
            )
        reasons |= {int(k): ("nonfinite", found) for k in wild}
        kept[wild] = False
        outs = None
    dropped = tuple(
        Dropped(step.placement, start + k, step.name, *reasons[k]) for k in sorted(reasons)
    )
    return outs, kept, dropped


def failing(kept: np.ndarray, call: Callable[..., Any]) -> dict[int, str]:
    """Finds who fails among the members of a shard that fail together.

    Args:
      kept: bool[count], the members that are tried.
      call: as for `compute_rest`.

    Returns:
      What each raises that fails alone, by its place.
    """
    found: dict[int, str] = {}

    def search(places: np.ndarray) -> None:
        mask = np.zeros(len(kept), np.bool_)
        mask[places] = True
        try:
            call(*_stand_ins(mask))
        except JobCancelledError:  # nobody's failure
            raise
        except Exception as error:
            if len(places) == 1:
                found[int(places[0])] = message_of(error)
                return
            half = len(places) // 2
            search(places[:half])
            search(places[half:])

    search(np.flatnonzero(kept))
    return found


def _stand_ins(kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of those that are computed: the first that counts stands for who does not."""
    places = np.arange(len(kept))
    return np.where(kept, places, np.flatnonzero(kept)[0]), kept


def message_of(error: BaseException) -> str:
    """What is told of an error: of a long text the end, where JAX has what a callback raised."""
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= MAX_MESSAGE else f"{text[:200]} ... {text[-MAX_MESSAGE:]}"


def read_rest(
    read: Callable[[int, int], Mapping[str, np.ndarray]],
    types: Mapping[str, ValueType],
    start: int,
    count: int,
) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """Reads the members of a shard that can be read.

    Args:
      read: reads the members [start, stop) of some values.
      types: of these values.
      start: the first member.
      count: how many there are.

    Returns:
      The values, with zeros for who can't be read, and why not, by their places.
    """
    lost: dict[int, str] = {}
    pieces: list[Mapping[str, np.ndarray]] = []

    def search(first: int, last: int) -> None:
        try:
            pieces.append(read(first, last))
        except JobCancelledError:
            raise
        except Exception as error:
            if last - first > 1:
                middle = (first + last) // 2
                search(first, middle)
                search(middle, last)
                return
            lost[first - start] = message_of(error)
            pieces.append({
                name: np.zeros((1, *value.shape), np.dtype(value.dtype))
                for name, value in types.items()
            })  # fmt: skip

    search(start, start + count)
    if len(pieces) == 1:
        return dict(pieces[0]), lost
    found = {}
    for name in types:
        arrays = [piece[name] for piece in pieces]
        # Where members are ragged each piece has the length of its longest.
        shape = max((array.shape[1:] for array in arrays), default=())
        found[name] = np.concatenate([padded_rows(array, shape) for array in arrays])
    return found, lost


def filled(array: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Placed results with NaN, or 0 where there is no NaN, for members that are not kept."""
    array = array.copy()
    array[~kept] = hole_of(array.dtype)
    return array
