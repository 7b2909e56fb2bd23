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
from headrace_operator.acting import Actor
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_status import Status
from headrace_operator.autoscale import serving
from headrace_operator.cluster import Cluster, ClusterError, NamespaceGoing, Refused
from headrace_operator.companions import needed_kinds
from headrace_operator.decide import Decision, Defaults, decide
from headrace_operator.drain import worth_asking
from headrace_operator.engines import Engines
from headrace_operator.events import RecentNotes, event_body, summarized
from headrace_operator.expectations import Expectations
from headrace_operator.figures import figures_of
from headrace_operator.following import Following
from headrace_operator.inventory import Inventory
from headrace_operator.leftovers import Leftovers
from headrace_operator.node_lookup import NodeLookup
from headrace_operator.node_loss import suspect_nodes, with_lost_pods
from headrace_operator.observe import Observed, ParsedPods, observe
from headrace_operator.pace import Pace
from headrace_operator.plans import Note
from headrace_operator.problems import describe_problems
from headrace_operator.progress import seconds_left
from headrace_operator.render.objects import Owner
from headrace_operator.repairs import RepairBudget
from headrace_operator.scaling import scaled
from headrace_operator.signal_board import SignalBoard
from headrace_operator.status import invalid_status, status_of
from headrace_operator.store import Store
from headrace_operator.vanished import vanished
from headrace_operator.workqueue import Key

logger = logging.getLogger(__name__)

Body = dict[str, Any]

# How long to wait for the watches to show the last writes before looking again; events usually come first.
LAG_SECONDS = 0.25


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
        board: SignalBoard | None = None,  # without it no deployment scales itself
        following: Following | None = None,  # without it there are no optional kinds
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._inventory = inventory
        self._defaults = defaults
        self._clock = clock
        self._engines = engines
        self._board = board
        self._following = following
        self._nodes = NodeLookup(cluster, clock)
        self._actor = Actor(cluster, self._is_wanted, clock)
        self._expectations: dict[Key, Expectations] = {}
        self._repairs: dict[Key, RepairBudget] = {}
        self._posted: dict[Key, RecentNotes] = {}
        self._ending: dict[Key, str] = {}  # uids of deployments whose namespace is being deleted
        self._parsed: dict[Key, ParsedPods] = {}
        self._pace = Pace()
        self._leftovers = Leftovers(cluster, self._nodes, self._pace)

    async def reconcile(self, key: Key) -> float | None:
        """One pass; returns seconds after which to look again. Raises ClusterError to be tried again with backoff."""
        started = time.monotonic()
        result = "error"
        try:
            wait = await self._pass(key, self._clock())
            result = "ok"
            return wait
        except Refused:
            result = "refused"
            raise
        finally:
            took = time.monotonic() - started
            metrics.RECONCILE_SECONDS.labels(namespace=key.namespace, result=result).observe(took)

    def rest_seconds(self, key: Key) -> float | None:
        """How long to wait before the next pass over a deployment; None: it may be looked at now."""
        return self._pace.rest_seconds(key, self._clock())

    async def _pass(self, key: Key, now: float) -> float | None:
        raw = self._store.deployment(key)
        objects = [*self._store.children(key), *(self._following.children(key) if self._following else ())]
        is_wanted = raw is not None and not raw["metadata"].get("deletionTimestamp")
        late = await self._leftovers.end(key, raw["metadata"]["uid"] if raw and is_wanted else "", objects, now)
        if raw is None or not is_wanted:
            self._forget(key)  # garbage collection does the rest
            if not objects:
                self._pace.forget(key)
            return late
        if self._ending.get(key) == raw["metadata"]["uid"]:
            return late  # it goes with its namespace, whose contents go in any order
        wait = await self._step(key, raw, objects, now)
        return min((seconds for seconds in (wait, late) if seconds), default=None)

    async def _step(self, key: Key, raw: Body, objects: list[Body], now: float) -> float | None:
        """The next step of a deployment that is there to stay."""
        if not self._are_writes_shown(key, [*objects, raw], now):
            return LAG_SECONDS
        self._expectations[key] = expected = Expectations()
        before = _status_before(raw)
        try:
            deployment = DisaggDeployment.from_stored(raw)
        except ValidationError as error:
            problem = describe_problems(error)
            status = invalid_status(before, raw["metadata"]["generation"], problem, now)
            metrics.DEPLOYMENTS.set(*key, figures_of(status, None))
            if await self._actor.write_status(raw, status, expected):
                await self._post(raw, [Note(names.REASON_SPEC_INVALID, problem, is_warning=True)])
            return None
        with self._pace.thinking(key, now):
            parsed = self._parsed.setdefault(key, ParsedPods())
            observed = observe(key.name, deployment.metadata.uid, objects, parsed)
        if observed.leftovers and not await self._is_live(key, deployment.metadata.uid):
            return LAG_SECONDS  # what is taken for a predecessor's could be a successor's, which no watch has shown yet
        if await self._actor.relabel(vanished(Owner.of(deployment), observed), deployment.metadata.uid, expected):
            return LAG_SECONDS
        silent = await self._nodes.silent(suspect_nodes(observed))
        observed = with_lost_pods(observed, silent, deployment.spec.restart_policy.node_loss_seconds, now)
        observed = self._with_signals(key, deployment, observed)
        observed = await self._ask_engines(scaled(deployment, observed, before, now).deployment, observed)
        generation = deployment.metadata.generation
        with self._pace.thinking(key, now):
            decided = self._decide(key, deployment, observed, before, now)
        if decided is None:
            return None  # whoever does not know it yet has it looked at again
        decision, pause = self._rationed(key, decided, generation, now)
        await self._hurry(observed, decision)
        refusals, failure = await self._actor.act(key, deployment.metadata.uid, decision, expected)
        if failure:
            self._inventory.release(key)
        if isinstance(failure, NamespaceGoing):
            self._ending[key] = deployment.metadata.uid
            return None
        if not self._is_wanted(key, deployment.metadata.uid):
            return None  # its end is noticed by the next pass
        status = status_of(decision.deployment, observed, decision, before, refusals, now)
        metrics.DEPLOYMENTS.set(*key, figures_of(status, decision))
        await self._actor.write_status(raw, status, expected)
        await self._actor.write_scaler_statuses(observed, expected)
        refused = [Note(names.REASON_REFUSED, refusals[0], is_warning=True)] if refusals else []
        await self._post(raw, [*decision.notes, *decision.repairs, *refused])
        if failure:
            raise failure
        deadline = seconds_left(
            status.progress, deployment.spec.rollout_strategy.progress_deadline_seconds, self._clock()
        )
        return min((wait for wait in (decision.wait_seconds, pause, deadline) if wait), default=None)

    def _are_writes_shown(self, key: Key, objects: Sequence[Body], now: float) -> bool:
        """Whether the watches have shown what the last pass wrote, as far as it is waited for."""
        expected = self._expectations.get(key)
        if expected is None:
            return True
        # A thousand pods come back one by one: to look at all of them each time would slow down those that follow.
        with self._pace.thinking(key, now):
            return expected.are_met({(body["kind"], body["metadata"]["name"]): body for body in objects}, now)

    def _forget(self, key: Key) -> None:
        """The deployment is gone, or is going."""
        for memory in (self._repairs, self._expectations, self._posted, self._parsed, self._ending):
            memory.pop(key, None)
        metrics.DEPLOYMENTS.forget(*key)
        self._inventory.forget(key)
        self._forget_signals(key)
        if self._following:
            self._following.forget(key)

    async def _ask_engines(self, wanted: DisaggDeployment, observed: Observed) -> Observed:
        """The same with what groups that are to go, or may be, have in flight."""
        keys = worth_asking(observed.groups, {role.name: role.replicas for role in wanted.spec.roles})
        if not keys or self._engines is None:
            return observed
        return replace(observed, loads=await self._engines.loads({key: observed.leader_address(key) for key in keys}))

    def _with_signals(self, key: Key, deployment: DisaggDeployment, observed: Observed) -> Observed:
        """The same with what engines said last of their load, where the deployment scales itself."""
        auto = deployment.spec.scaling.auto
        if self._board is None or auto is None:
            self._forget_signals(key)
            return observed
        addresses = {leader: observed.leader_address(leader) for leader in serving(observed)}
        self._board.follow(key, addresses, float(auto.interval_seconds))
        return replace(observed, samples=self._board.samples(key))

    def _forget_signals(self, key: Key) -> None:
        if self._board is not None:
            self._board.forget(key)

    async def _hurry(self, observed: Observed, decision: Decision) -> None:
        if self._engines is not None:
            await asyncio.gather(*(self._engines.hurry(observed.leader_address(k)) for k in decision.drains.hurry))

    def _decide(
        self, key: Key, deployment: DisaggDeployment, observed: Observed, before: Status, now: float
    ) -> Decision | None:
        """The next step, with the room for it claimed; None: what there is to use is not known yet."""
        problems: dict[str, str] | None = {}
        if self._following:
            problems = self._following.problems(key, needed_kinds(deployment, observed))
        if problems is None:
            return None
        if deployment.spec.placement is None:
            self._inventory.forget(key)
            return decide(deployment, observed, before, self._defaults, now, None, problems)
        capacity = self._inventory.capacity(key)
        if capacity is None:
            return None
        decision = decide(deployment, observed, before, self._defaults, now, capacity, problems)
        if decision.admission:
            self._inventory.record(key, decision.admission)
        return decision

    async def _is_live(self, key: Key, uid: str) -> bool:
        """Whether the API server itself has the deployment under this uid."""
        live = await self._cluster.get(names.KIND, key.namespace, key.name)
        return live is not None and live["metadata"]["uid"] == uid

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


def _status_before(raw: Body) -> Status:
    try:
        return Status.model_validate(raw.get("status") or {})
    except ValidationError:
        return Status()  # it is computed anew; only the memory of failures is lost
