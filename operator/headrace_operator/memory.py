"""What the planner remembers from pass to pass: read from the resource's status, and written back to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_operator.api_status import LeavingGroup, NodeFailures
from headrace_operator.api_status import Rebuild as StoredRebuild
from headrace_operator.groups import GroupKey, Rebuild
from headrace_operator.plans import RolePlan
from headrace_operator.times import epoch_seconds, timestamp

# Rebuilt groups whose last words are told in full: all of them at once could be more than the API server stores.
_MAX_TAILS = 64


def key_of(stored: StoredRebuild | LeavingGroup) -> GroupKey:
    return GroupKey(stored.role, stored.revision, stored.group)


def noted_rebuild(stored: StoredRebuild) -> Rebuild:
    return Rebuild(
        stored.failures,
        epoch_seconds(stored.last_time),
        stored.message,
        is_final=stored.given_up,
        nodes=tuple((node.name, node.failures) for node in stored.nodes),
    )


def stored_rebuilds(plans: Mapping[str, RolePlan]) -> list[StoredRebuild]:
    """What is noted of every group; only the latest failures keep the last lines of their logs."""
    noted = [item for plan in plans.values() for item in plan.rebuilds]
    latest = sorted((rebuild.time for _, rebuild in noted), reverse=True)
    oldest_told = latest[_MAX_TAILS - 1] if len(latest) >= _MAX_TAILS else float("-inf")
    return [
        StoredRebuild(
            role=key.role,
            group=key.index,
            revision=key.revision,
            failures=rebuild.failures,
            given_up=rebuild.is_final,
            nodes=[NodeFailures(name=name, failures=failures) for name, failures in rebuild.nodes],
            last_time=timestamp(rebuild.time),
            message=rebuild.message if rebuild.time > oldest_told else rebuild.message.partition("\n")[0],
        )
        for key, rebuild in noted
    ]


def stored_leaving(plans: Mapping[str, RolePlan]) -> list[LeavingGroup]:
    return [
        LeavingGroup(role=key.role, group=key.index, revision=key.revision)
        for plan in plans.values()
        for key in plan.leaving
    ]
