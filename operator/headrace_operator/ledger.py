"""Room that was given to groups whose pods no watch has shown yet, and groups that were taken back. Pure; `now` is
passed in.

Passes over two deployments follow each other faster than the API server tells of the pods they make. A claim bridges
that gap: what one pass gives to a group the next one finds taken. From the moment a pod is seen it speaks for itself,
so claims need not outlive the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace_operator.admission import Claim
from headrace_operator.groups import GroupKey
from headrace_operator.scheduling import PodShape
from headrace_operator.workqueue import Key

# Longest that a pod takes from being decided to being seen; one that was never made gives its room back then.
CLAIM_SECONDS = 30.0
_FIRST_WAIT_SECONDS = 10.0
_LONGEST_WAIT_SECONDS = 300.0
# A group that was not taken back for so long starts anew.
_MEMORY_SECONDS = 1800.0

UidOf = Callable[[str, str], str | None]  # of a pod, by namespace and name; None: no such pod was seen


@dataclass(frozen=True)
class _Entry:
    shape: PodShape
    is_held: bool
    until: float
    predecessors: Mapping[str, str | None]  # by name of the pod: uid of the one that had the name before


@dataclass(frozen=True)
class OpenClaim:
    """Pods that were claimed for and not seen yet. `is_held`: they are not even made yet."""

    key: Key
    shape: PodShape
    count: int
    is_held: bool


@dataclass(frozen=True)
class _TakenBack:
    times: int
    at: float

    @property
    def not_before(self) -> float:
        return self.at + min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** min(self.times - 1, 10))


class Ledger:
    """Claims and take-backs of all deployments. Times are epoch seconds."""

    def __init__(self) -> None:
        self._claims: dict[Key, dict[GroupKey, _Entry]] = {}
        self._taken_back: dict[Key, dict[GroupKey, _TakenBack]] = {}

    def claim(self, key: Key, claims: Sequence[Claim], uid_of: UidOf, now: float) -> None:
        """These pods are about to be made. What was held for the deployment before is forgotten."""
        known = self._claims.get(key, {})
        for group in [group for group, entry in known.items() if entry.is_held]:
            del known[group]
        for claim in claims:
            entry = _Entry(
                claim.shape, claim.is_held, now + CLAIM_SECONDS, {pod: uid_of(key.namespace, pod) for pod in claim.pods}
            )
            self._claims.setdefault(key, {})[claim.group] = entry

    def release(self, key: Key) -> None:
        """What the deployment was about to make is not made, or is known by now."""
        self._claims.pop(key, None)

    def open_claims(self, uid_of: UidOf, now: float) -> list[OpenClaim]:
        """What was given out and cannot be seen in the cluster yet."""
        result = []
        for key, entries in list(self._claims.items()):
            for group, entry in list(entries.items()):
                unseen = sum(uid_of(key.namespace, pod) in (None, uid) for pod, uid in entry.predecessors.items())
                if unseen and now < entry.until:
                    result.append(OpenClaim(key, entry.shape, unseen, entry.is_held))
                else:
                    del entries[group]
            if not entries:
                del self._claims[key]
        return result

    def take_back(self, key: Key, groups: Sequence[GroupKey], now: float) -> None:
        """These groups did not find places for all of their pods: each waits twice as long as the last time."""
        for group in groups:
            before = self._taken_back.get(key, {}).get(group)
            times = before.times if before and now - before.at < _MEMORY_SECONDS else 0
            self._taken_back.setdefault(key, {})[group] = _TakenBack(times + 1, now)

    def not_before(self, key: Key) -> dict[GroupKey, float]:
        """When the groups of a deployment that were taken back may be made again."""
        return {group: entry.not_before for group, entry in self._taken_back.get(key, {}).items()}

    def forget(self, key: Key) -> None:
        """The deployment is gone."""
        self._claims.pop(key, None)
        self._taken_back.pop(key, None)
