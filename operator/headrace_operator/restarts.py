"""How often a group failed, and when it may be made again. Pure: what is noted and `now` in, what to note next out.

A group fails as a whole: a pod of it ended, was edited or vanished. It is made again after 1, 2, 4, ... 60 s when it
fails again and again; failures that are long past are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_operator.groups import FAILURE_MEMORY_SECONDS, GroupState, Pod, Rebuild


@dataclass(frozen=True)
class Memory:
    """What is still noted of a group that has all its pods, and for how long if nothing happens."""

    rebuild: Rebuild | None
    wait_seconds: float | None = None  # look again then


def after_failure(before: Rebuild | None, revision: str, pods: Sequence[Pod], size: int | None, now: float) -> Rebuild:
    """The note of a group that fails now, to be made again from `revision`. `size`: pods that it should have."""
    is_remembered = before is not None and now - before.time < FAILURE_MEMORY_SECONDS
    failures = 1 + (before.failures if before and is_remembered else 0)
    return Rebuild(revision, failures, now, failure_message(pods, size))


def memory_of(noted: Rebuild | None, state: GroupState, now: float) -> Memory:
    """What to remember of a group that is forming or ready."""
    if noted is None:
        return Memory(None)
    age = now - noted.time
    if noted.failures == 0 or (state is GroupState.READY and age >= FAILURE_MEMORY_SECONDS):
        return Memory(None)
    return Memory(noted, FAILURE_MEMORY_SECONDS - age if age < FAILURE_MEMORY_SECONDS else None)


def failure_message(pods: Sequence[Pod], size: int | None) -> str:
    """What ended a group: the first line says it, the rest are the last words of the pod that ended."""
    for pod in pods:
        if pod.is_edited:
            return f"pod {pod.name} was edited"
    for pod in pods:
        if pod.is_finished:
            return pod.trouble.message if pod.trouble else f"pod {pod.name} ended ({pod.phase})"
    return f"{(size or 0) - len(pods)} of its {size} pods vanished or could not be made"
