"""Carries out a decision: deletes and applies, then the statuses. What to do is not decided here.

Every write is noted in the pass's expectations, so that the next pass waits until the watches have shown it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headrace_operator import names
from headrace_operator.api_status import Status
from headrace_operator.children import Application
from headrace_operator.cluster import Cluster, ClusterError, Exists, NamespaceGoing, NameTaken, Refused
from headrace_operator.decide import Decision
from headrace_operator.drain import GateChange
from headrace_operator.drift import has_drifted, metadata_repair, status_has_drifted
from headrace_operator.expectations import Expectations
from headrace_operator.field_owners import owned_by_apply
from headrace_operator.observe import Observed, controller_uid
from headrace_operator.scaling import stale_scaler_statuses
from headrace_operator.status import as_applied, gate_condition
from headrace_operator.workqueue import Key

Body = dict[str, Any]

# Applied after the rest: pods need their Services, and the template they were made from must be stored before they
# exist; a binding is refused while its Role does not exist.
_NEED_OTHERS = ("Pod", "RoleBinding")


class Actor:
    """Writes for all deployments. `is_wanted`: whether the deployment of a key (with this uid) is there to stay."""

    def __init__(self, cluster: Cluster, is_wanted: Callable[[Key, str], bool], clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._is_wanted = is_wanted
        self._clock = clock

    async def act(
        self, key: Key, uid: str, decision: Decision, expected: Expectations
    ) -> tuple[list[str], ClusterError | None]:
        """Deletes and applies at once where order does not matter; what failed does not stop the rest.

        Returns what the API server would not have, and the first failure (one that makes all others pointless if there
        is one)."""
        namespace = key.namespace
        deletions = [
            self._delete("Pod", namespace, d.pod_name, d.uid, d.grace_seconds, expected) for d in decision.delete_pods
        ] + [self._delete(d.kind, namespace, d.name, d.uid, None, expected) for d in decision.delete_children]
        gates = [self._set_gate(namespace, change, expected) for change in decision.drains.gates]
        first = [a for a in decision.apply if a.body["kind"] not in _NEED_OTHERS]
        second = [a for a in decision.apply if a.body["kind"] in _NEED_OTHERS]
        applied = [self._apply(key, application, uid, expected) for application in first]
        outcomes: list[Any] = await asyncio.gather(*applied, *deletions, *gates, return_exceptions=True)
        failed = [a for a, outcome in zip(first, outcomes, strict=False) if isinstance(outcome, BaseException)]
        second = _without_groups_of(failed, second)
        outcomes += await asyncio.gather(
            *(self._apply(key, application, uid, expected) for application in second), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, ClusterError)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ClusterError):
                raise outcome
        refusals = [str(failure) for failure in failures if isinstance(failure, Refused)]
        failures.sort(key=lambda failure: not isinstance(failure, NamespaceGoing))
        return refusals, failures[0] if failures else None

    async def relabel(self, bodies: Sequence[Body], uid: str, expected: Expectations) -> bool:
        """Give those of these pods their labels back that exist without them; whether there is one, which is then
        waited for (also if it has them, and the watches are only late)."""
        return any(await asyncio.gather(*(self._relabel(body, uid, expected) for body in bodies)))

    async def _relabel(self, body: Body, uid: str, expected: Expectations) -> bool:
        where = body["metadata"]
        live = await self._cluster.get("Pod", where["namespace"], where["name"])
        if live is None or controller_uid(live) != uid or "deletionTimestamp" in live["metadata"]:
            return False
        if has_drifted(live, body):
            live = await self._cluster.apply(metadata_repair(live, body), names.METADATA_MANAGER)
        expected.wrote({"kind": "Pod", **live}, self._clock())
        return True

    async def write_status(self, raw: Body, status: Status, expected: Expectations) -> bool:
        """Write the status if it says anything new."""
        wanted = as_applied(status)
        if not status_has_drifted(raw.get("status") or {}, wanted):
            return False
        metadata = raw["metadata"]
        written = await self._cluster.apply_status(metadata["namespace"], metadata["name"], metadata["uid"], wanted)
        if written is not None:
            expected.wrote({"kind": names.KIND, **written}, self._clock())
        return written is not None

    async def write_scaler_statuses(self, observed: Observed, expected: Expectations) -> None:
        for body, status in stale_scaler_statuses(observed):
            where = body["metadata"]
            written = await self._cluster.apply_status(
                where["namespace"], where["name"], where["uid"], status, names.SCALER_KIND
            )
            if written is not None:
                expected.wrote({"kind": names.SCALER_KIND, **written}, self._clock())

    async def _apply(self, key: Key, application: Application, uid: str, expected: Expectations) -> None:
        if not self._is_wanted(key, uid):
            return  # deleted since the pass began: garbage collection would race with what is made now
        body = application.body
        if application.is_creation:
            written = await self._created(application, uid)
        elif application.is_metadata_only:
            written = await self._cluster.apply(body, names.METADATA_MANAGER)
        else:
            written = await self._applied(body, await self._check_owner(body, uid))
        expected.wrote({"kind": body["kind"], **written}, self._clock())

    async def _created(self, application: Application, uid: str) -> Body:
        """The object as stored. If it is there already the watches have not shown it yet, or cannot, because it has
        lost the label that they select: its labels are given back."""
        body = application.body
        try:
            return await self._cluster.create(body)
        except Exists:
            existing = await self._check_owner(body, uid)
            if existing is None:
                raise  # it has just gone: worth another try
            if application.is_written_once:
                return await self._cluster.apply(metadata_repair(existing, body), names.METADATA_MANAGER)
            return await self._applied(body, existing)

    async def _applied(self, body: Body, existing: Body | None) -> Body:
        """The object as stored, with nothing left of ours that `body` does not say."""
        entries = owned_by_apply(existing["metadata"].get("managedFields") or ()) if existing else None
        if existing and entries:
            await self._cluster.set_field_owners(existing, entries)
        return await self._cluster.apply(body, names.MANAGER)

    async def _check_owner(self, body: Body, uid: str) -> Body | None:
        """The object of this name, if there is one. Raises NameTaken if it is somebody else's: an apply would take it
        over silently."""
        metadata = body["metadata"]
        existing = await self._cluster.get(body["kind"], metadata["namespace"], metadata["name"])
        if existing is not None and controller_uid(existing) != uid:
            raise NameTaken(f"{body['kind']} {metadata['name']} exists and belongs to someone else")
        return existing

    async def _delete(
        self, kind: str, namespace: str, name: str, uid: str, grace_seconds: int | None, expected: Expectations
    ) -> None:
        if await self._cluster.delete(kind, namespace, name, uid, grace_seconds) is not None:
            expected.removed(kind, name, uid, self._clock())

    async def _set_gate(self, namespace: str, change: GateChange, expected: Expectations) -> None:
        condition = gate_condition(change.is_open, self._clock())
        written = await self._cluster.set_gate(namespace, change.pod_name, change.uid, condition)
        if written is not None:
            expected.wrote({"kind": "Pod", **written}, self._clock())


def _without_groups_of(failed: Sequence[Application], applications: Sequence[Application]) -> list[Application]:
    """Without new pods of groups whose companions were not made: a pod cannot be given another one later."""
    groups = {_group_of(application.body) for application in failed} - {None}
    return [a for a in applications if not (a.is_new and _group_of(a.body) in groups)]


def _group_of(body: Body) -> tuple[str, ...] | None:
    labels = body["metadata"]["labels"]
    if names.LABEL_GROUP not in labels:
        return None
    return tuple(labels[label] for label in (names.LABEL_ROLE, names.LABEL_REVISION, names.LABEL_GROUP))
