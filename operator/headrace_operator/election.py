"""Who of several operators works: when a Lease may be taken, and how long what was taken holds. Pure.

Only one operator may write at a time. It renews a Lease (coordination.k8s.io/v1) every `RETRY_SECONDS`; the others
look at it and may take it once they have seen it unchanged for its whole duration. Clocks of two machines are never
compared: times in the Lease are for people, each side measures with its own monotonic clock. A holder that cannot renew
stops *starting* writes `RENEW_DEADLINE_SECONDS` after its last renewal was sent, and gives each one no more time than
is left of the Lease; so its last write is over before anyone else may begin.

(The client library brings an elector. It ends on the first refused connection and writes local times as UTC.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_operator.times import timestamp

DURATION_SECONDS = 15
RENEW_DEADLINE_SECONDS = 10.0
RETRY_SECONDS = 2.0

Body = Mapping[str, Any]


class Election:
    """One candidate's view of a Lease. `now`: seconds of its monotonic clock."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._seen: tuple[Any, ...] | None = None
        self._seen_since = 0.0
        self._renewed_at: float | None = None  # when the last renewal that succeeded was sent

    def observe(self, lease: Body | None, now: float) -> None:
        """The Lease was read at `now`."""
        spec = (lease or {}).get("spec") or {}
        seen = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_since = seen, now

    def lose_sight(self) -> None:
        """The Lease could not be read: its holder may have been cut off too, so its time starts anew."""
        self._seen = None

    def may_take(self, lease: Body | None, now: float) -> bool:
        """Whether the Lease that was just observed is free, ours, or run out."""
        spec = (lease or {}).get("spec") or {}
        if not spec.get("holderIdentity") or spec["holderIdentity"] == self.identity:
            return True
        return now >= self._seen_since + float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)

    def renewed(self, sent_at: float) -> None:
        """A write of the Lease that was sent at `sent_at` succeeded."""
        self._renewed_at = sent_at

    def seconds_left(self, now: float) -> float:
        """How long a write that starts now may take; 0 if none may start."""
        if self._renewed_at is None or now >= self._renewed_at + RENEW_DEADLINE_SECONDS:
            return 0.0
        return self._renewed_at + DURATION_SECONDS - now


def held(lease: Body | None, namespace: str, name: str, identity: str, wall_time: float) -> dict[str, Any]:
    """The Lease with `identity` as its holder, renewed at `wall_time` (epoch seconds). None: there was none yet."""
    before = (lease or {}).get("spec") or {}
    is_ours = before.get("holderIdentity") == identity
    transitions = int(before.get("leaseTransitions") or 0)
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": (lease or {}).get("metadata") or {"name": name, "namespace": namespace},
        "spec": {
            "holderIdentity": identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "acquireTime": before.get("acquireTime") if is_ours else timestamp(wall_time),
            "renewTime": timestamp(wall_time),
            "leaseTransitions": transitions if is_ours or not lease else transitions + 1,
        },
    }


def released(lease: Body) -> dict[str, Any]:
    """The Lease without a holder: the next candidate need not wait."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": ""}}
