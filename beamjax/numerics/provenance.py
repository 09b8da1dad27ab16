"""Provenance: the kinds of machine that computed a value, on which its last bits depend.

It travels with partials, blocks and server values, and is merged with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from beamjax.errors import ArrayFormatError
from beamjax.storage.schema import add_codec

MAX_KINDS = 8
"""Largest number of kinds in a provenance, which drops the last ones in order. Two are enough to
know that it is mixed."""
MAX_HOSTS = 2
"""Largest number of hosts of each kind, which are for messages."""
MAX_TEXT = 1000
"""Largest number of characters of a kind or a host."""


@dataclass(frozen=True)
class Provenance:
    """The kinds of machine that computed a value."""

    # A text for each kind, with the names of a few hosts. Equal texts promise equal bits for the
    # same plan.
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, other: Provenance) -> Provenance:
        """The provenance of a value made from both: commutative, associative and idempotent."""
        if not other.kinds or self == other:
            return self
        if not self.kinds:
            return other
        # The first ones in order stay, so the result does not depend on the order of merges.
        kinds: dict[str, tuple[str, ...]] = {}
        for kind in sorted({**self.kinds, **other.kinds})[:MAX_KINDS]:
            hosts = {*self.kinds.get(kind, ()), *other.kinds.get(kind, ())}
            kinds[kind] = tuple(sorted(hosts)[:MAX_HOSTS])
        return Provenance(kinds)

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @property
    def is_mixed(self) -> bool:
        """Whether another run of the same plan may give other bits."""
        return len(self.kinds) > 1

    def mixture(self) -> str:
        """A sentence on the kinds of machine that were mixed."""
        listed = "; ".join(f"{', '.join(hosts)} ({kind})" for kind, hosts in self.kinds.items())
        return f"the workers may give different last bits: found {listed}, expected one kind"

    def to_json(self) -> dict[str, list[str]]:
        """Plain JSON values."""
        return {kind: list(hosts) for kind, hosts in self.kinds.items()}

    @classmethod
    def from_json(cls, plain: Any) -> Provenance:
        """Undoes `to_json`; None gives the empty provenance."""
        if plain is None:
            return UNKNOWN
        if not (
            isinstance(plain, dict)
            and len(plain) <= MAX_KINDS
            and all(_is_entry(kind, hosts) for kind, hosts in plain.items())
        ):
            raise ArrayFormatError(
                f"provenance: found {plain!r:.200}, expected up to {MAX_KINDS} kinds of machine "
                f"with up to {MAX_HOSTS} hosts each"
            )
        return cls({kind: tuple(hosts) for kind, hosts in plain.items()})


def _is_entry(kind: Any, hosts: Any) -> bool:
    texts = [kind, *hosts] if isinstance(hosts, list) and len(hosts) <= MAX_HOSTS else [None]
    return all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts)


add_codec(Provenance, Provenance.to_json, Provenance.from_json)

UNKNOWN = Provenance()
"""The provenance of inputs, and of values computed without a record."""


def merged(parts: Iterable[Provenance]) -> Provenance:
    """The provenance of a value made from values with these."""
    return functools.reduce(Provenance.__or__, parts, UNKNOWN)
