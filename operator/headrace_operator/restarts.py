"""How often a group failed, and when it may be made again. Pure: what is noted and `now` in, what to note next out.

A group fails as a whole: a pod of it ended, was edited or restarted, or vanished. It is made again after a wait that
doubles with every failure in a row, up to a cap. After `max_restarts` it is *given up*: it is not made again until its
template changes, more restarts are allowed, or someone asks for it (`headrace retry`). Failures are in a row until the
group has been ready for a while: one that takes ten minutes to load and then crashes is as broken as a fast one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_operator.groups import GroupState, Pod, Rebuild, RestartRules

# A group that has been ready for so long starts counting its failures from zero.
FAILURE_MEMORY_SECONDS = 600.0
# The share of a wait that chance may take off it.
_JITTER = 0.2
# A node is avoided once a group has failed on it so often in a row.
BAD_NODE_FAILURES = 2
_MAX_NODES = 8  # remembered of one group


@dataclass(frozen=True)
class Memory:
    """What is still noted of a group that has all its pods, and for how long if nothing happens."""

    rebuild: Rebuild | None
    wait_seconds: float | None = None  # look again then


def after_failure(
    before: Rebuild | None, pods: Sequence[Pod], size: int | None, rules: RestartRules, now: float
) -> Rebuild:
    """The note of a group that fails now. `size`: pods that it should have."""
    failures = 1 + (before.failures if before else 0)
    return Rebuild(
        failures,
        now,
        failure_message(pods, size),
        is_final=failures > rules.max_restarts,
        nodes=_blamed(before.nodes if before else (), pods),
    )


def is_given_up(noted: Rebuild | None, rules: RestartRules) -> bool:
    """Whether the group is not to be made again. Allowing more restarts than it had is a way to go on."""
    return noted is not None and noted.is_final and noted.failures > rules.max_restarts


def memory_of(noted: Rebuild | None, state: GroupState, pods: Sequence[Pod], now: float) -> Memory:
    """What to remember of a group that is forming or ready."""
    if noted is None or noted.failures == 0:
        return Memory(None)
    noted = replace(noted, is_final=False)
    if state is not GroupState.READY:
        return Memory(noted)
    age = now - max(pod.ready_since if pod.ready_since is not None else noted.time for pod in pods)
    return Memory(None) if age >= FAILURE_MEMORY_SECONDS else Memory(noted, FAILURE_MEMORY_SECONDS - age)


def wait_seconds(noted: Rebuild | None, role: str, index: int, rules: RestartRules, now: float) -> float:
    """Seconds until the group may be made again; 0 or less: now."""
    return noted.time + backoff_seconds(noted.failures, f"{role}/{index}", rules) - now if noted else 0.0


def backoff_seconds(failures: int, group: str, rules: RestartRules) -> float:
    """Seconds to wait after so many failures in a row: base, 2 base, 4 base, ... up to the cap, less up to a fifth.

    The fifth is drawn from the group's identity and the count: groups that fail together come back one after the
    other, and the same state always gives the same plan.
    """
    if failures <= 0:
        return 0.0
    whole = min(rules.backoff_max_seconds, rules.backoff_base_seconds * 2.0 ** min(failures - 1, 30))
    digest = hashlib.sha256(f"{rules.seed}/{group}/{failures}".encode()).digest()
    return whole * (1.0 - _JITTER * int.from_bytes(digest[:4], "big") / 2**32)


def bad_nodes(noted: Rebuild | None) -> tuple[str, ...]:
    """Nodes that the group's next pods should avoid."""
    return tuple(name for name, failures in noted.nodes if failures >= BAD_NODE_FAILURES) if noted else ()


def failure_message(pods: Sequence[Pod], size: int | None) -> str:
    """What ended a group: the first line says it, the rest are the last words of the pod that ended first."""
    for pod in pods:
        if pod.is_edited:
            return f"pod {pod.name} was edited"
    culprit = _first_ended(pods)
    if culprit:
        how = f"ended ({culprit.phase})" if culprit.is_finished else "was restarted in place"
        text = culprit.trouble.message if culprit.trouble else f"pod {culprit.name} {how}"
        head, line_break, tail = text.partition("\n")
        return f"{head}{f' on node {culprit.node}' if culprit.node else ''}{line_break}{tail}"
    return f"{(size or 0) - len(pods)} of its {size} pods vanished or could not be made"


def _first_ended(pods: Sequence[Pod]) -> Pod | None:
    """The pod that took the group along: its siblings end because of it."""
    ended = [pod for pod in pods if pod.is_finished or pod.is_restarted]
    return min(ended, key=lambda p: p.finished_at if p.finished_at is not None else float("inf"), default=None)


def _blamed(nodes: Sequence[tuple[str, int]], pods: Sequence[Pod]) -> tuple[tuple[str, int], ...]:
    """The failures by node, with this one; the latest last. A pod that someone edited says nothing of its node."""
    culprit = None if any(pod.is_edited for pod in pods) else _first_ended(pods)
    if culprit is None or not culprit.node:
        return tuple(nodes)
    before = dict(nodes)
    failures = before.pop(culprit.node, 0) + 1
    return (*before.items(), (culprit.node, failures))[-_MAX_NODES:]
