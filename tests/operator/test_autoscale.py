"""scaling.mode Auto in a deployment: whose counts hold, what is remembered, said and written, and when nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.operator.test_reconcile import FakeServer, settle
from tests.operator.test_signals import NOTHING, SAMPLE
from tests.operator.worlds import DEFAULTS, UID, FakeCluster, ready_status, stored

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_status import AutoScalingStatus, Condition, Status
from headrace_operator.autoscale import serving
from headrace_operator.decide import Decision, decide
from headrace_operator.drain import SETTLE_SECONDS
from headrace_operator.groups import GroupKey
from headrace_operator.inventory import Inventory
from headrace_operator.observe import observe
from headrace_operator.reconcile import Reconciler
from headrace_operator.report import status_table
from headrace_operator.signals import Sample
from headrace_operator.status import as_applied, gate_condition, invalid_status, status_of
from headrace_operator.workqueue import Key

IDLE = replace(
    SAMPLE, num_ranks=1, num_requests=2, num_running=2, num_waiting_for_kv=0, num_queued_tokens=0, num_blocks=100,
    num_free_blocks=90, num_prompt_tokens=3000, prompt_seconds=3.0,
    ticket=NOTHING, prompt=NOTHING, inter_token=NOTHING,
)  # fmt: skip
QUEUED = replace(IDLE, num_queued_tokens=5000)  # at 1000 tokens a second: 5 s, of 2 s at the most
FULL = replace(IDLE, num_requests=40, num_running=40)  # of 32


def auto(generation: int = 1, replicas: tuple[int, int] = (2, 2), **fields: Any) -> DisaggDeployment:
    """A deployment of one-rank groups with a budget of four GPUs, if not told otherwise."""
    return stored(
        {
            "spec.scaling": {"mode": "Auto", "auto": {"gpuBudget": 4, **fields}},
            "spec.roles.0.replicas": replicas[0],
            "spec.roles.1.replicas": replicas[1],
        },
        generation,
    )


class World(FakeCluster):
    """Pods that have addresses, and engines that say what they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[str, Sample | None] = {"prefill": IDLE, "decode": IDLE}

    def look(self, deployment: DisaggDeployment, now: float, is_asked: bool = True) -> Decision:
        """One pass, after the engines were asked."""
        self.give_addresses()
        observed = observe("demo", UID, self.objects.values())
        said = {key: self.says[key.role] for key in serving(observed)}
        samples = {key: replace(sample, time=now) for key, sample in said.items() if sample}
        observed = replace(observed, samples=samples if is_asked else None)
        decision = decide(deployment, observed, self.status, DEFAULTS, now)
        status = status_of(decision.deployment, observed, decision, self.status, (), now)
        self.status = Status.model_validate(as_applied(status))
        for application in decision.apply:
            self.store(application.body)
        for deletion in decision.delete_pods:
            del self.objects["Pod", deletion.pod_name]
        for change in decision.drains.gates:
            conditions = self.objects["Pod", change.pod_name]["status"]["conditions"]
            conditions[:] = [c for c in conditions if c["type"] != names.GATE_SERVING]
            conditions.append(gate_condition(change.is_open, now - SETTLE_SECONDS))  # routers hear of it at once
        return decision

    def give_addresses(self) -> None:
        for pod in self.pods().values():
            if "status" in pod:
                pod["status"]["podIP"] = "10.0.0.1"
                if names.GATE_SERVING not in {c["type"] for c in pod["status"]["conditions"]}:
                    pod["status"]["conditions"] += [{"type": names.GATE_SERVING, "status": "True"}]

    def settle_at(self, deployment: DisaggDeployment, now: float) -> None:
        for _ in range(30):
            decision = self.look(deployment, now, is_asked=False)
            if not (decision.apply or decision.delete_pods or decision.drains.gates):
                return
            self.make_all_ready()
        raise AssertionError("not settled")

    def make_all_ready(self) -> None:
        """As for others, but gates that were closed stay so."""
        for pod in self.pods().values():
            pod.setdefault("status", ready_status())
        self.make_router_ready()

    @property
    def auto(self) -> AutoScalingStatus:
        assert self.status.autoscaling is not None
        return self.status.autoscaling

    @property
    def counts(self) -> tuple[int | None, ...]:
        return tuple(role.replicas for role in self.status.roles)

    def condition(self, kind: str) -> Condition:
        return next(c for c in self.status.conditions if c.type == kind)


def settled(deployment: DisaggDeployment) -> World:
    world = World()
    world.settle_at(deployment, 0.0)
    return world


def test_a_new_deployment_starts_with_the_counts_of_its_spec_within_the_budget() -> None:
    assert settled(auto(replicas=(1, 3))).counts == (1, 3)
    assert settled(auto(replicas=(3, 9))).counts == (2, 2)
    assert settled(auto(replicas=(3, 1), decode={"minReplicas": 2})).counts == (2, 2)


def test_a_role_that_stays_short_gets_a_group_of_the_other() -> None:
    world = settled(auto())
    world.says["prefill"] = QUEUED
    world.look(auto(), 15)
    assert (world.auto.state, world.counts) == ("Holding", (2, 2))
    world.look(auto(), 45)
    decision = world.look(auto(), 75)
    assert (world.auto.state, world.counts) == ("Moved", (3, 1))
    assert world.auto.last_move_to == "prefill"
    told = {note.reason: note.message for note in decision.notes}
    assert told[names.EVENT_REBALANCED].startswith("prefill goes from 2 to 3 groups, decode from 2 to 1; prefill is at")
    assert "5 s of prompts are queued (target 2)" in told[names.EVENT_REBALANCED]
    assert names.EVENT_SCALED in told
    world.settle_at(auto(), 80)
    assert len(world.pods()) == 4
    world.says["prefill"] = IDLE
    world.look(auto(), 95)
    assert (world.auto.state, world.auto.last_move_message) == ("Balanced", told[names.EVENT_REBALANCED])


def test_the_group_of_the_giver_goes_before_the_new_one_is_made() -> None:
    world = settled(auto(holdSeconds=0))
    world.says["prefill"] = QUEUED
    decision = world.look(auto(holdSeconds=0), 15)
    gone = [name for name in world.objects if name[0] == "Pod" and "decode" in name[1]]
    made = [application for application in decision.apply if application.body["kind"] == "Pod" and application.is_new]
    assert made == []
    assert len(gone) == 2, "it is drained first"
    assert [change.is_open for change in decision.drains.gates] == [False]


def test_a_dry_run_keeps_the_specs_counts_and_says_once_what_it_would_do() -> None:
    dry = auto(dryRun=True, holdSeconds=30)
    world = settled(dry)
    world.says["prefill"] = QUEUED
    events = []
    for now in (15, 45, 60, 75):
        events += [note.reason for note in world.look(dry, now).notes]
    assert (world.auto.state, world.counts) == (names.REASON_WOULD_MOVE, (2, 2))
    assert events == [names.EVENT_ADVISED]
    assert world.auto.message.startswith("prefill goes from 2 to 3 groups, decode from 2 to 1")
    assert world.auto.last_move is None


def test_after_a_move_the_specs_counts_hold_no_more() -> None:
    world = settled(auto(holdSeconds=0))
    world.says["prefill"] = QUEUED
    world.look(auto(holdSeconds=0), 15)
    world.settle_at(auto(2, replicas=(1, 1), holdSeconds=0), 20)
    assert world.counts == (3, 1)
    world.settle_at(stored(generation=3), 30)  # Static, with one group each
    assert world.counts == (1, 1)
    assert world.status.autoscaling is None


def test_a_smaller_budget_is_obeyed_at_once() -> None:
    world = settled(auto())
    world.settle_at(auto(2, gpuBudget=3), 10)
    assert world.counts == (1, 2)


def test_without_a_status_the_groups_that_are_there_tell_the_counts() -> None:
    world = settled(auto(replicas=(3, 1)))
    world.status = Status()
    world.look(auto(replicas=(2, 2)), 10, is_asked=False)
    assert world.counts == (3, 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_group_that_says_nothing_keeps_all_from_moving(role: str) -> None:
    world = settled(auto(holdSeconds=0))
    world.says |= {"prefill": QUEUED, role: None}
    world.look(auto(holdSeconds=0), 15)
    assert (world.auto.state, world.counts) == ("SignalsMissing", (2, 2))


def test_what_was_said_too_long_ago_is_not_known() -> None:
    world = settled(auto(holdSeconds=0))
    world.give_addresses()
    observed = observe("demo", UID, world.objects.values())
    old = {key: replace(QUEUED if key.role == "prefill" else IDLE, time=100.0) for key in serving(observed)}
    for now, state in ((145.0, "Moved"), (146.0, "SignalsMissing")):
        decision = decide(auto(holdSeconds=0), replace(observed, samples=old), world.status, DEFAULTS, now)
        assert decision.autoscaling is not None
        assert decision.autoscaling.state == state


def test_what_nobody_can_give_is_a_condition() -> None:
    world = settled(auto())
    world.says |= {"prefill": QUEUED, "decode": FULL}
    decision = world.look(auto(), 15)
    limited = world.condition(names.SCALING_LIMITED)
    assert (limited.status, limited.reason) == ("True", "NothingToGive")
    assert "decode is at 1.25 of its targets itself" in limited.message
    assert [note.reason for note in decision.notes] == [names.SCALING_LIMITED]
    assert world.look(auto(), 30).notes == ()
    world.says |= {"prefill": IDLE, "decode": IDLE}
    world.look(auto(), 45)
    assert world.condition(names.SCALING_LIMITED).status == "False"


def test_an_operator_that_has_asked_nobody_yet_says_what_was_said() -> None:
    world = settled(auto())
    world.says["prefill"] = QUEUED
    world.look(auto(), 15)
    before = as_applied(world.status)
    world.look(auto(), 20, is_asked=False)
    assert as_applied(world.status) == before
    world.look(auto(), 75)
    assert world.auto.state == "Moved", "the need is as old as it was"


def test_a_spec_that_breaks_a_rule_keeps_the_memory() -> None:
    world = settled(auto())
    world.says["prefill"] = QUEUED
    world.look(auto(), 15)
    assert invalid_status(world.status, 2, "it is wrong", 20.0).autoscaling == world.auto


def test_numbers_that_change_are_written_once_a_minute_and_others_not_at_all() -> None:
    world = settled(auto())
    written = []
    for now in range(15, 240, 15):
        world.says["decode"] = replace(IDLE, num_requests=2 + now // 15)
        before = as_applied(world.status)
        world.look(auto(), now)
        if as_applied(world.status) != before:
            written.append(now)
    assert written == [15, 75, 135, 195]
    for now in range(300, 420, 15):
        before = as_applied(world.status)
        world.look(auto(), now)
        assert now == 300 or as_applied(world.status) == before


def test_headrace_status_shows_it() -> None:
    world = settled(auto(holdSeconds=0))
    world.says["prefill"] = QUEUED
    world.look(auto(holdSeconds=0), 15)
    table = status_table({"metadata": {"name": "demo"}, "status": as_applied(world.status)})
    assert "auto scaling: Moved (1970-01-01T00:00:15" in table
    assert "last move 1970-01-01T00:00:15" in table
    assert "prefill goes from 2 to 3 groups" in table


# --- the pass ---


class Board:
    """What a signal board does for a pass."""

    def __init__(self) -> None:
        self.followed: dict[Key, dict[GroupKey, str]] = {}
        self.said: dict[GroupKey, Sample] | None = None

    def follow(self, key: Key, addresses: dict[GroupKey, str], interval_seconds: float) -> None:
        self.followed[key] = addresses
        assert interval_seconds == 15

    def forget(self, key: Key) -> None:
        self.followed.pop(key, None)

    def samples(self, key: Key) -> dict[GroupKey, Sample] | None:
        return self.said


async def test_a_pass_names_whom_to_ask_and_shows_what_they_said() -> None:
    server = FakeServer({"spec.scaling": {"mode": "Auto", "auto": {"gpuBudget": 4}}})
    board = Board()
    inventory = Inventory(server, lambda key: None)  # type: ignore[arg-type]
    subject = Reconciler(server, server, inventory, DEFAULTS, clock=lambda: 100.0, board=board)  # type: ignore[arg-type]
    key = Key("default", "demo")
    await settle(server, subject)
    assert board.followed == {key: {}}, "no pod has an address"
    for pod in server.world.pods().values():
        pod["status"] = {**pod["status"], "podIP": "10.0.0.7"}
        pod["status"]["conditions"] = [*pod["status"]["conditions"], {"type": names.GATE_SERVING, "status": "True"}]
    await subject.reconcile(key)
    assert sorted(leader.role for leader in board.followed[key]) == ["decode", "prefill"]
    assert set(board.followed[key].values()) == {"10.0.0.7:8000"}
    board.said = {leader: replace(IDLE, time=100.0) for leader in board.followed[key]}
    await subject.reconcile(key)
    assert server.raw is not None
    assert server.raw["status"]["autoscaling"]["state"] == "Balanced"
    where = {"namespace": "default", "deployment": "demo"}
    value = REGISTRY.get_sample_value(
        "headrace_operator_autoscale_pressure", where | {"role": "decode", "signal": "requests"}
    )
    assert value == pytest.approx(2 / 32)
    server.calls.clear()
    await subject.reconcile(key)
    assert server.calls == [], "a look that says the same writes nothing"
    server.raw["metadata"]["deletionTimestamp"] = "now"
    await subject.reconcile(key)
    assert board.followed == {}
