"""When both roles change to another KV fingerprint: which old group may go next without unpairing the others. Pure.

Groups can pair iff the fingerprints of their caches are equal, so from the first change to the last there are two
deployments in one: old prefill with old decode, new prefill with new decode. An old group may go when

1. of the new fingerprint there is an available group of the other role (so that new groups can serve), and
2. the ratio of the roles holds on both sides: the role with more groups goes ahead, no further than its new groups have
   partners; the role with fewer keeps old groups for the old ones that the other still has.

The first new group of a role that may not surge has to take the place of an old one. It may, unless that is the last
old one while the other role has several: then the other role begins. Old groups that are not ready serve nobody and are
none of this file's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Side:
    """One role: its wanted groups, and how many are available, of the wanted KV fingerprint and of others."""

    role: str
    replicas: int
    num_new: int
    num_old: int


class Pairing:
    """Asked before an available group of an old KV fingerprint is retired, told after; for one pass."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = {side.role: side for side in sides}
        # The role that goes ahead has more groups; among equals it is the first, prefill.
        self._ahead = max(sides, key=lambda side: side.replicas).role if sides else ""

    def obstacle(self, role: str) -> str | None:
        """Why no old group of `role` may be retired now; None if one may."""
        own = self._sides[role]
        other = next((side for side in self._sides.values() if side.role != role), None)
        if other is None or not own.replicas or not other.replicas:
            return None
        if own.num_new == 0:
            if own.num_old > 1 or other.num_new or other.num_old <= 1:
                return None
            return (
                f"the first {other.role} group of the new KV fingerprint has to be ready before the last old one goes"
            )
        if other.num_new == 0:
            return f"no {other.role} group of the new KV fingerprint is ready yet"
        if role == self._ahead:
            # Counted by the old groups that are gone, not by new ones: with surge these come first, and two roles that
            # have surged as far as they can would wait for each other.
            needed = max(1, other.replicas * (own.replicas - own.num_old) // own.replicas)
            if other.num_new >= needed:
                return None
            return f"{needed} {other.role} groups of the new KV fingerprint have to be ready first, {other.num_new} are"
        needed = -(-own.replicas * other.num_old // other.replicas)
        if own.num_old > needed:
            return None
        return f"{other.num_old} {other.role} groups of the old KV fingerprint still need it"

    def retired(self, role: str) -> None:
        """An available old group of `role` is on its way out."""
        self._sides[role].num_old -= 1
