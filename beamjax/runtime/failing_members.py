"""Computes a shard without the members that can't be read or computed."""

# The shard is bisected to find the failing members, and computed again without them. Each is
# replaced by a member that did not fail, so bodies never see the failing values, and the result
# depends only on the members that are left.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from beamjax.errors import JobCancelledError, WorkerError
from beamjax.plan.dropping import MAX_MESSAGE, Dropped, hole_of
from beamjax.plan.steps import Map, ValueType
from beamjax.sources.padding import padded_rows

Call = Callable[[np.ndarray, np.ndarray], list[np.ndarray]]
"""Calls a body. Its arguments are the positions of the members to compute and a mask of those that
count."""


def compute_rest(
    step: Map, start: int, kept: np.ndarray, lost: Mapping[int, str], call: Call
) -> tuple[list[np.ndarray] | None, np.ndarray, tuple[Dropped, ...]]:
    """Computes the members that can be computed: the results, a mask of these, and the others."""
    # `kept` is False for members that an earlier pass dropped; `lost` has the reasons why members
    # could not be read, by their position in the shard. The results do not have the flags of finite
    # members, which the body returns last; they are None if no member is left.
    guard = step.guard
    assert guard is not None
    reasons = {k: ("error", text) for k, text in lost.items() if kept[k]}
    kept = kept.copy()
    kept[list(lost)] = False
    outs = None
    # Each turn drops at least one member, or ends.
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
        message = "found NaN or infinity in a value that is reduced, gathered or returned"
        if guard.on_nonfinite == "raise":
            members = ", ".join(str(start + k) for k in wild[:8])
            more = f" and {len(wild) - 8} more" if len(wild) > 8 else ""
            raise WorkerError(
                f"member {members}{more}: {message}, expected finite numbers (option "
                "on_nonfinite='raise')"
            )
        reasons |= {int(k): ("nonfinite", message) for k in wild}
        kept[wild] = False
        outs = None
    dropped = tuple(
        Dropped(step.placement, start + k, step.name, *reasons[k]) for k in sorted(reasons)
    )
    return outs, kept, dropped


def failing(kept: np.ndarray, call: Callable[..., Any]) -> dict[int, str]:
    """Bisects a shard to find the error of each member that fails by itself, by its position."""

    def attempt(places: np.ndarray) -> None:
        mask = np.zeros(len(kept), np.bool_)
        mask[places] = True
        call(*_stand_ins(mask))

    return dict(_bisected(np.flatnonzero(kept), attempt))


def _bisected(
    places: np.ndarray, attempt: Callable[[np.ndarray], None]
) -> Iterator[tuple[int, str]]:
    """Tries members together, and halves a group that fails; yields single members that fail."""
    try:
        attempt(places)
    except JobCancelledError:  # not the failure of a member
        raise
    except Exception as error:
        if len(places) == 1:
            yield int(places[0]), message_of(error)
            return
        for half in np.split(places, [len(places) // 2]):
            yield from _bisected(half, attempt)


def _stand_ins(kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions to compute: the first member that counts replaces those that do not count."""
    places = np.arange(len(kept))
    return np.where(kept, places, np.flatnonzero(kept)[0]), kept


def message_of(error: BaseException) -> str:
    """A message of limited length. It keeps the end, where JAX reports errors of callbacks."""
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= MAX_MESSAGE else f"{text[:200]} ... {text[-MAX_MESSAGE:]}"


def read_rest(
    read: Callable[[int, int], Mapping[str, np.ndarray]],
    types: Mapping[str, ValueType],
    start: int,
    count: int,
) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """Reads members, with zeros for those that can't be read, and the reasons by position."""
    lost: dict[int, str] = {}
    # In the order of members, since `_bisected` tries the first half first.
    pieces: list[Mapping[str, np.ndarray]] = []

    def attempt(places: np.ndarray) -> None:
        pieces.append(read(start + int(places[0]), start + int(places[-1]) + 1))

    for place, message in _bisected(np.arange(count), attempt):
        lost[place] = message
        pieces.append({
            name: np.zeros((1, *value.shape), np.dtype(value.dtype))
            for name, value in types.items()
        })  # fmt: skip
    if len(pieces) == 1:
        return dict(pieces[0]), lost
    joined = {}
    for name in types:
        arrays = [piece[name] for piece in pieces]
        # With ragged members, each range is padded to its own longest member.
        shape = max((array.shape[1:] for array in arrays), default=())
        joined[name] = np.concatenate([padded_rows(array, shape) for array in arrays])
    return joined, lost


def filled(array: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Placed results in which dropped members are NaN, or 0 for dtypes without NaN."""
    array = array.copy()
    array[~kept] = hole_of(array.dtype)
    return array
