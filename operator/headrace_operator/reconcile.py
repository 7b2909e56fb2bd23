"""One pass over one deployment: observe, decide, act, write the status once, then post events.

A pass starts from what exists, keeps nothing between passes but what it is still waiting to see, and may be run at any
time: with nothing to do it makes no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from headrace_operator import metrics, names
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_status import Status
from headrace_operator.children import Application
from headrace_operator.cluster import Cluster, ClusterError, NameTaken, Refused
from headrace_operator.decide import Decision, Defaults, decide
from headrace_operator.drain import GateChange, worth_asking
from headrace_operator.drift import status_has_drifted
from headrace_operator.engines import Engines
from headrace_operator.events import RecentNotes, event_body, summarized
from headrace_operator.expectations import Expectations
from headrace_operator.figures import figures_of
from headrace_operator.groups import GroupKey
from headrace_operator.inventory import Inventory
from headrace_operator.node_lookup import NodeLookup
from headrace_operator.node_loss import suspect_nodes, with_lost_pods
from headrace_operator.observe import Observed, controller_uid, observe
from headrace_operator.pace import Pace
from headrace_operator.plans import Note
from headrace_operator.problems import describe_problems
from headrace_operator.progress import seconds_left
from headrace_operator.repairs import RepairBudget
from headrace_operator.scaling import scaled, stale_scaler_statuses
from headrace_operator.status import as_applied, gate_condition, invalid_status, status_of
from headrace_operator.store import Store
from headrace_operator.workqueue import Key

logger = logging.getLogger(__name__)

Body = dict[str, Any]

# How long to wait for the watches to show the last writes before looking again; events usually come first.
LAG_SECONDS = 0.25
# Applied after the rest: pods need their Services, and the template they were made from must be stored before they
# exist; a binding is refused while its Role does not exist.
_NEED_OTHERS = ("Pod", "RoleBinding")


class Reconciler:
    """Carries out what `decide` says, for all deployments; the queue gives each key to one task at a time."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        inventory: Inventory,
        defaults: Defaults,
        clock: Callable[[], float] = time.time,
        engines: Engines | None = None,  # without them no group is waited for
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._inventory = inventory
        self._defaults = defaults
        self._clock = clock
        self._engines = engines
        self._nodes = NodeLookup(cluster, clock)
        self._expectations: dict[Key, Expectations] = {}
        self._repairs: dict[Key, RepairBudget] = {}
        self._posted: dict[Key, RecentNotes] = {}
        self._pace = Pace()

    async def reconcile(self, key: Key) -> float | None:
        """One pass; returns seconds after which to look again. Raises ClusterError to be tried again with backoff."""
        rest = self._pace.rest_seconds(key, self._clock())
        if rest:
            return rest
        started = time.monotonic()
        result = "error"
        try:
            wait = await self._pass(key)
            result = "ok"
            return wait
        except Refused:
            result = "refused"
            raise
        finally:
            took = time.monotonic() - started
            metrics.RECONCILE_SECONDS.labels(namespace=key.namespace, result=result).observe(took)

    async def _pass(self, key: Key) -> float | None:
        raw = self._store.deployment(key)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            for memory in (self._repairs, self._expectations, self._posted):
                memory.pop(key, None)  # garbage collection does the rest
            metrics.DEPLOYMENTS.forget(*key)
            self._inventory.forget(key)
            self._pace.forget(key)
            return None
        objects = self._store.children(key)
        now = self._clock()
        expected = self._expectations.get(key)
        if expected:
            shown = {(body["kind"], body["metadata"]["name"]): body for body in [*objects, raw]}
            if not expected.are_met(shown, now):
                return LAG_SECONDS
        self._expectations[key] = expected = Expectations()
        before = _status_before(raw)
        try:
            deployment = DisaggDeployment.from_stored(raw)
        except ValidationError as error:
            problem = describe_problems(error)
            status = invalid_status(before, raw["metadata"]["generation"], problem, now)
            metrics.DEPLOYMENTS.set(*key, figures_of(status, None))
            if await self._write_status(raw, status, expected):
                await self._post(raw, [Note(names.REASON_SPEC_INVALID, problem, is_warning=True)])
            return None
        with self._pace.thinking(key, len(objects), now):
            observed = observe(key.name, deployment.metadata.uid, objects)
        silent = await self._nodes.silent(suspect_nodes(observed))
        observed = with_lost_pods(observed, silent, deployment.spec.restart_policy.node_loss_seconds, now)
        observed = await self._ask_engines(scaled(deployment, observed, before).deployment, observed)
        generation = deployment.metadata.generation
        with self._pace.thinking(key, len(objects), now):
            decided = self._decide(key, deployment, observed, before, now)
        if decided is None:
            return None  # the inventory has it looked at again
        decision, pause = self._rationed(key, decided, generation, now)
        await self._hurry(observed, decision)
        refusals, failure = await self._act(key, deployment.metadata.uid, decision, expected)
        if failure:
            self._inventory.release(key)
        if not self._is_wanted(key, deployment.metadata.uid):
            return None  # its end is noticed by the next pass
        status = status_of(decision.deployment, observed, decision, before, refusals, now)
        metrics.DEPLOYMENTS.set(*key, figures_of(status, decision))
        await self._write_status(raw, status, expected)
        await self._write_scaler_statuses(observed, expected)
        refused = [Note(names.REASON_REFUSED, refusals[0], is_warning=True)] if refusals else []
        await self._post(raw, [*decision.notes, *decision.repairs, *refused])
        if failure:
            raise failure
        deadline = seconds_left(
            status.progress, deployment.spec.rollout_strategy.progress_deadline_seconds, self._clock()
        )
        return min((wait for wait in (decision.wait_seconds, pause, deadline) if wait), default=None)

    async def _ask_engines(self, wanted: DisaggDeployment, observed: Observed) -> Observed:
        """The same with what groups that are to go, or may be, have in flight."""
        keys = worth_asking(observed.groups, {role.name: role.replicas for role in wanted.spec.roles})
        if not keys or self._engines is None:
            return observed
        return replace(observed, loads=await self._engines.loads({key: _leader_address(observed, key) for key in keys}))

    async def _hurry(self, observed: Observed, decision: Decision) -> None:
        if self._engines is not None:
            await asyncio.gather(
                *(self._engines.hurry(_leader_address(observed, key)) for key in decision.drains.hurry)
            )

    def _decide(
        self, key: Key, deployment: DisaggDeployment, observed: Observed, before: Status, now: float
    ) -> Decision | None:
        """The next step, with the room for it claimed; None: what room there is is not known yet."""
        if deployment.spec.placement is None:
            self._inventory.forget(key)
            return decide(deployment, observed, before, self._defaults, now)
        capacity = self._inventory.capacity(key)
        if capacity is None:
            return None
        decision = decide(deployment, observed, before, self._defaults, now, capacity)
        if decision.admission:
            self._inventory.record(key, decision.admission)
        return decision

    def _is_wanted(self, key: Key, uid: str) -> bool:
        """Whether the deployment still exists, as far as the watches have shown, and is not being deleted."""
        raw = self._store.deployment(key)
        return raw is not None and raw["metadata"]["uid"] == uid and not raw["metadata"].get("deletionTimestamp")

    def _rationed(self, key: Key, decision: Decision, generation: int, now: float) -> tuple[Decision, float | None]:
        """The decision without repairs while too many were made; and for how long."""
        budget = self._repairs.get(key)
        if budget is None or budget.generation != generation:
            # The first pass over a spec brings all children up to it, which is not a fight.
            self._repairs[key] = RepairBudget(generation)
            return decision, None
        num_repairs = sum(not application.is_new for application in decision.apply)
        if not num_repairs:
            return decision, None
        pause = budget.wait_seconds(now)
        if not pause:
            budget.spend(num_repairs, now)
            return decision, None
        logger.warning("%s/%s: someone else keeps changing its children; repairs pause for %.0f s", *key, pause)
        return decision.without_repairs(), pause

    async def _act(
        self, key: Key, uid: str, decision: Decision, expected: Expectations
    ) -> tuple[list[str], ClusterError | None]:
        """Deletes and applies at once where order does not matter; what failed does not stop the rest."""
        namespace = key.namespace
        deletions = [
            self._delete("Pod", namespace, d.pod_name, d.uid, d.grace_seconds, expected) for d in decision.delete_pods
        ] + [self._delete(d.kind, namespace, d.name, d.uid, None, expected) for d in decision.delete_children]
        gates = [self._set_gate(namespace, change, expected) for change in decision.drains.gates]
        first = [a for a in decision.apply if a.body["kind"] not in _NEED_OTHERS]
        second = [a for a in decision.apply if a.body["kind"] in _NEED_OTHERS]
        outcomes: list[Any] = []
        for batch in (
            [*deletions, *gates, *(self._apply(key, application, uid, expected) for application in first)],
            [self._apply(key, application, uid, expected) for application in second],
        ):
            outcomes += await asyncio.gather(*batch, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, ClusterError)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ClusterError):
                raise outcome
        refusals = [str(failure) for failure in failures if isinstance(failure, Refused)]
        return refusals, failures[0] if failures else None

    async def _apply(self, key: Key, application: Application, uid: str, expected: Expectations) -> None:
        if not self._is_wanted(key, uid):
            return  # deleted since the pass began: garbage collection would race with what is made now
        body = application.body
        kind, metadata = body["kind"], body["metadata"]
        # A pod that is not ours cannot be taken over (its spec is fixed); any other kind could be, silently.
        if application.is_new and kind != "Pod":
            existing = await self._cluster.get(kind, metadata["namespace"], metadata["name"])
            if existing is not None and controller_uid(existing) != uid:
                raise NameTaken(f"{kind} {metadata['name']} exists and belongs to someone else")
            if kind == names.SCALER_KIND:
                if existing is None:
                    expected.wrote({"kind": kind, **await self._cluster.create(body)}, self._clock())
                return  # from now on only others write its spec
        manager = names.METADATA_MANAGER if application.is_metadata_only else names.MANAGER
        expected.wrote({"kind": kind, **await self._cluster.apply(body, manager)}, self._clock())

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

    async def _write_status(self, raw: Body, status: Status, expected: Expectations) -> bool:
        """Write the status if it says anything new."""
        wanted = as_applied(status)
        if not status_has_drifted(raw.get("status") or {}, wanted):
            return False
        metadata = raw["metadata"]
        written = await self._cluster.apply_status(metadata["namespace"], metadata["name"], metadata["uid"], wanted)
        if written is not None:
            expected.wrote({"kind": names.KIND, **written}, self._clock())
        return written is not None

    async def _write_scaler_statuses(self, observed: Observed, expected: Expectations) -> None:
        for body, status in stale_scaler_statuses(observed):
            where = body["metadata"]
            written = await self._cluster.apply_status(
                where["namespace"], where["name"], where["uid"], status, names.SCALER_KIND
            )
            if written is not None:
                expected.wrote({"kind": names.SCALER_KIND, **written}, self._clock())

    async def _post(self, raw: Body, notes: Sequence[Note]) -> None:
        key = Key(raw["metadata"]["namespace"], raw["metadata"]["name"])
        recent = self._posted.setdefault(key, RecentNotes())
        for note in recent.news(summarized(notes), self._clock()):
            logger.info(
                "%s/%s: %s: %s", raw["metadata"]["namespace"], raw["metadata"]["name"], note.reason, note.message
            )
            try:
                await self._cluster.create_event(event_body(raw, note, self._clock()))
            except ClusterError as error:
                logger.warning("an event was lost: %s", error)


def _leader_address(observed: Observed, key: GroupKey) -> str:
    address = observed.groups[key][0].address
    return f"[{address}]:{names.PORT_HTTP}" if ":" in address else f"{address}:{names.PORT_HTTP}"


def _status_before(raw: Body) -> Status:
    try:
        return Status.model_validate(raw.get("status") or {})
    except ValidationError:
        return Status()  # it is computed anew; only the memory of failures is lost
