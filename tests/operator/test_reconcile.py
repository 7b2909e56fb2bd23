"""A pass of the reconciler over a fake API server: what it writes, and when it writes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.operator.rule_cases import resource
from tests.operator.worlds import DEFAULTS, UID, FakeCluster

from headrace_operator import names
from headrace_operator.cluster import ClusterError, Exists, NamespaceGoing, Refused
from headrace_operator.inventory import Inventory
from headrace_operator.leftovers import RETRY_SECONDS
from headrace_operator.pace import MAX_REST_SECONDS
from headrace_operator.reconcile import LAG_SECONDS, Reconciler
from headrace_operator.repairs import MAX_REPAIRS, WINDOW_SECONDS
from headrace_operator.workqueue import Key

KEY = Key("default", "demo")


class FakeServer:
    """Stands in for both the store and the API server: what is written is shown at once, unless `is_lagging`."""

    def __init__(self, changes: dict[str, Any] | None = None) -> None:
        self.raw: dict[str, Any] | None = resource(changes)
        self.raw["metadata"] |= {"namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "1"}
        self.world = FakeCluster()
        self.shown: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.is_lagging = False
        self.namespace_is_going = False
        self.refuse = ""
        self.foreign: dict[tuple[str, str], dict[str, Any]] = {}
        self.live: dict[str, Any] | None = None  # the deployment, if the watches are behind

    def deployment(self, key: Key) -> dict[str, Any] | None:
        return self.raw

    def children(self, key: Key) -> list[dict[str, Any]]:
        if not self.is_lagging:
            self._give_changes_a_version()
            self.shown = copy.deepcopy(list(self.world.objects.values()))
        return self.shown

    def _give_changes_a_version(self) -> None:
        """Tests change objects in place; an API server would not do so under the same resourceVersion."""
        shown = {(body["kind"], body["metadata"]["name"]): body for body in self.shown}
        for place, body in self.world.objects.items():
            before = shown.get(place, body)
            if before != body and before["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]:
                self.world.version += 1
                body["metadata"]["resourceVersion"] = str(self.world.version)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if kind == names.KIND:
            return self.live or self.raw
        return self.foreign.get((kind, name)) or self.world.objects.get((kind, name))

    async def set_gate(self, namespace: str, name: str, uid: str, condition: dict[str, Any]) -> dict[str, Any] | None:
        self.calls.append(f"gate {condition['status']}")
        pod = self.world.objects.get(("Pod", name))
        if pod is None:
            return None
        self.world.version += 1
        pod["metadata"]["resourceVersion"] = str(self.world.version)
        others = [c for c in pod["status"]["conditions"] if c["type"] != condition["type"]]
        pod["status"]["conditions"] = [*others, condition]
        return pod

    async def get_node(self, name: str) -> dict[str, Any] | None:
        return {}  # it answers

    async def apply(self, body: dict[str, Any], field_manager: str) -> dict[str, Any]:
        assert field_manager == names.MANAGER or body.keys() <= {"apiVersion", "kind", "metadata", "revision"}
        self.calls.append(f"apply {body['kind']}")
        if self.refuse == body["kind"]:
            raise Refused(f"apply {body['kind']}: exceeded quota")
        return self.world.store(body)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, grace: int | None) -> dict[str, Any] | None:
        self.calls.append(f"delete {kind}")
        return self.world.objects.pop((kind, name), None)

    async def set_field_owners(self, body: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        self.calls.append(f"own {body['kind']}")
        body["metadata"]["managedFields"] = entries

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(f"create {body['kind']}")
        if self.namespace_is_going:
            raise NamespaceGoing(f"create {body['kind']}: the namespace is being terminated")
        if self.refuse == body["kind"]:
            raise Refused(f"create {body['kind']}: exceeded quota")
        place = (body["kind"], body["metadata"]["name"])
        if place in self.world.objects or place in self.foreign:
            raise Exists(f"create {body['kind']}: it exists")
        return self.world.store(body)

    async def apply_status(
        self, namespace: str, name: str, uid: str, status: dict[str, Any], kind: str = names.KIND
    ) -> dict[str, Any]:
        if kind != names.KIND:
            self.calls.append(f"status {kind}")
            self.world.objects[kind, name]["status"] = status
            return self.world.objects[kind, name]
        self.calls.append("status")
        assert self.raw is not None
        self.world.version += 1
        self.raw = {**self.raw, "status": status}
        self.raw["metadata"] = {**self.raw["metadata"], "resourceVersion": str(self.world.version + 1)}
        return self.raw

    async def set_finalizers(self, body: dict[str, Any], finalizers: list[str]) -> None:
        self.calls.append(f"finalizers {finalizers}")
        if self.refuse == "finalizers":
            raise ClusterError("patch Pod: Kueue's webhook does not answer")
        self.world.objects.pop(("Pod", body["metadata"]["name"]), None)

    async def create_event(self, event: dict[str, Any]) -> None:
        self.calls.append(f"event {event['reason']}")

    def condition(self, kind: str) -> dict[str, Any]:
        assert self.raw is not None
        return next(c for c in self.raw["status"]["conditions"] if c["type"] == kind)


def reconciler(server: FakeServer) -> Reconciler:
    inventory = Inventory(server, lambda key: None)  # type: ignore[arg-type]
    return Reconciler(server, server, inventory, DEFAULTS, clock=lambda: 100.0)  # type: ignore[arg-type]


async def settle(server: FakeServer, subject: Reconciler) -> None:
    for _ in range(20):
        server.calls.clear()
        await subject.reconcile(KEY)
        if not server.calls:
            return
        server.world.make_all_ready()
    raise AssertionError(server.calls)


async def test_a_first_pass_makes_everything_then_one_status_then_events() -> None:
    server = FakeServer()
    await reconciler(server).reconcile(KEY)
    kinds = [call.split()[0] for call in server.calls]
    assert kinds.count("status") == 1
    assert kinds.index("status") > max(i for i, kind in enumerate(kinds) if kind == "apply")
    assert kinds.index("event") > kinds.index("status")
    made = [call.split()[1] for call in server.calls if call.startswith(("apply", "create"))]
    assert made.index("Pod") > made.index("ControllerRevision")
    assert made.index("RoleBinding") > made.index("Role")
    applied = {call.split()[1] for call in server.calls if call.startswith("apply")}
    assert applied == {"ControllerRevision"}  # one that was created could not be patched, nor orphaned


async def test_a_settled_deployment_costs_no_request() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    assert server.condition(names.READY)["status"] == "True"
    await subject.reconcile(KEY)
    await reconciler(server).reconcile(KEY)  # a new process knows no less
    assert server.calls == []


async def test_it_waits_until_its_writes_are_shown() -> None:
    server = FakeServer()
    subject = reconciler(server)
    server.is_lagging = True
    await subject.reconcile(KEY)
    server.calls.clear()
    assert await subject.reconcile(KEY) == LAG_SECONDS
    assert server.calls == []


async def test_an_invalid_stored_spec_is_reported_once_and_changes_nothing() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    before = copy.deepcopy(server.world.objects)
    assert server.raw is not None
    server.raw["spec"]["roles"] = [{"name": "decode"}]
    server.raw["metadata"]["generation"] = 2
    assert await subject.reconcile(KEY) is None
    assert server.calls == ["status", f"event {names.REASON_SPEC_INVALID}"]
    assert "prefill and decode together" in server.condition(names.VALID)["message"]
    server.calls.clear()
    await subject.reconcile(KEY)
    assert server.calls == []
    assert server.world.objects == before


async def test_a_deployment_that_is_being_deleted_is_left_to_garbage_collection() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    assert server.raw is not None
    server.raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    next(iter(server.world.pods().values()))["status"] = {"phase": "Failed"}
    assert await subject.reconcile(KEY) is None
    server.world.objects.clear()
    assert await subject.reconcile(KEY) is None
    server.raw = None
    assert await subject.reconcile(KEY) is None
    assert server.calls == []


async def test_a_refusal_is_reported_and_tried_again_and_the_rest_is_made() -> None:
    server = FakeServer()
    server.refuse = "Pod"
    subject = reconciler(server)
    with pytest.raises(ClusterError, match="exceeded quota"):
        await subject.reconcile(KEY)
    assert server.condition(names.READY)["reason"] == names.REASON_REFUSED
    assert "exceeded quota (and 1 more)" in server.condition(names.READY)["message"]
    assert ("Service", "demo") in server.world.objects
    server.refuse = ""
    await settle(server, subject)
    assert server.condition(names.READY)["status"] == "True"


async def test_once_its_namespace_is_being_deleted_nothing_more_is_written_for_a_deployment() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    server.namespace_is_going = True
    for name in list(server.world.pods()):  # one after the other, as the namespace's controller deletes them
        del server.world.objects["Pod", name]
        await subject.reconcile(KEY)
    assert [call for call in server.calls if not call.startswith("create Pod")] == []
    server.calls.clear()
    assert await subject.reconcile(KEY) is None
    assert server.calls == []


async def test_a_name_without_our_label_that_is_taken_is_not_touched() -> None:
    server = FakeServer()
    server.foreign["Service", "demo"] = {"kind": "Service", "metadata": {"name": "demo"}}
    with pytest.raises(Refused, match="belongs to someone else"):
        await reconciler(server).reconcile(KEY)
    assert ("Service", "demo") not in server.world.objects
    assert "belongs to someone else" in server.condition(names.READY)["message"]


async def test_a_pod_of_somebody_else_is_told_and_left_alone() -> None:
    server = FakeServer()
    await settle(server, reconciler(server))
    name = next(iter(server.world.pods()))
    del server.world.objects["Pod", name]
    server.foreign["Pod", name] = {"kind": "Pod", "metadata": {"name": name}}
    with pytest.raises(Refused, match=f"Pod {name} exists and belongs to someone else"):
        await reconciler(server).reconcile(KEY)
    assert server.condition(names.READY)["reason"] == names.REASON_REFUSED


async def test_pods_that_no_watch_has_shown_yet_are_waited_for_and_not_made_again() -> None:
    server = FakeServer()
    await reconciler(server).reconcile(KEY)
    before = {name: pod["metadata"]["uid"] for name, pod in server.world.pods().items()}
    server.shown = [body for body in server.world.objects.values() if body["kind"] != "Pod"]
    server.is_lagging = True
    subject = reconciler(server)  # a new process, whose list is older than the pods
    await subject.reconcile(KEY)
    assert {name: pod["metadata"]["uid"] for name, pod in server.world.pods().items()} == before
    assert await subject.reconcile(KEY) == LAG_SECONDS


@pytest.mark.parametrize("num_pods", [1, 2])
async def test_a_pod_that_lost_the_label_it_is_watched_by_gets_it_back(num_pods: int) -> None:
    server = FakeServer({"spec.roles.1.parallelism": {"data": num_pods, "dataLocal": 1}})
    subject = reconciler(server)
    await settle(server, subject)
    name = next(name for name in server.world.pods() if "decode" in name)
    pod = server.world.objects["Pod", name]
    del pod["metadata"]["labels"][names.LABEL_MANAGED_BY]
    server.shown = [body for body in server.world.objects.values() if body is not pod]
    server.is_lagging = True
    await subject.reconcile(KEY)
    assert pod["metadata"]["labels"][names.LABEL_MANAGED_BY] == names.MANAGER
    assert server.world.objects["Pod", name] is pod
    assert "delete Pod" not in server.calls, "its group is whole"
    assert await subject.reconcile(KEY) == LAG_SECONDS


async def test_a_pod_that_no_watch_has_shown_yet_is_waited_for_beside_others_that_run() -> None:
    server = FakeServer({"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1}})
    await settle(server, reconciler(server))
    late = next(name for name in server.world.pods() if "decode" in name)
    server.shown = [body for key, body in server.world.objects.items() if key != ("Pod", late)]
    server.is_lagging = True
    server.calls.clear()
    assert await reconciler(server).reconcile(KEY) == LAG_SECONDS
    assert server.calls == []


async def test_a_pod_that_is_really_gone_is_asked_for_once_and_its_group_made_again() -> None:
    server = FakeServer({"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1}})
    subject = reconciler(server)
    await settle(server, subject)
    del server.world.objects["Pod", next(name for name in server.world.pods() if "decode" in name)]
    server.calls.clear()
    await subject.reconcile(KEY)
    assert server.calls.count("delete Pod") == 1


@pytest.mark.parametrize("is_behind", [False, True], ids=["what it left goes", "unless it is ours that is gone"])
async def test_what_a_deployment_of_the_same_name_left_goes(is_behind: bool) -> None:
    """Garbage collection can miss it for good, if the next one of that name came before its watch had recovered."""
    server = FakeServer()
    await settle(server, reconciler(server))
    assert server.raw is not None
    old = {body["metadata"]["uid"] for body in server.world.objects.values()}
    server.raw["metadata"]["uid"] = "of-another-life"
    if is_behind:
        server.live = {"metadata": {"uid": "of-a-third-life"}}
        assert await reconciler(server).reconcile(KEY) == LAG_SECONDS
        assert {body["metadata"]["uid"] for body in server.world.objects.values()} == old
        return
    subject = reconciler(server)
    await subject.reconcile(KEY)
    assert not server.world.objects
    assert server.condition(names.READY)["reason"] != names.REASON_NAME_TAKEN
    await settle(server, subject)
    assert server.condition(names.READY)["status"] == "True"


@pytest.mark.parametrize("owner", ["gone", "going", "replaced"])
async def test_a_pod_that_nobody_ends_is_removed_though_its_deployment_is(owner: str) -> None:
    server = FakeServer()
    await settle(server, reconciler(server))
    pod = next(body for name, body in server.world.pods().items() if "decode" in name)
    pod["metadata"]["deletionTimestamp"] = "1970-01-01T00:00:50Z"  # now it is 00:01:40
    server.world.objects = {("Pod", pod["metadata"]["name"]): pod}
    server.calls.clear()
    assert server.raw is not None
    if owner == "going":
        server.raw["metadata"]["deletionTimestamp"] = "1970-01-01T00:00:10Z"
    elif owner == "replaced":
        server.raw["metadata"]["uid"] = "of-another-life"
    else:
        server.raw = None
    await reconciler(server).reconcile(KEY)
    assert server.calls[0] == "delete Pod"
    assert pod not in server.world.objects.values()


async def test_a_fight_over_a_child_is_given_up_for_a_while() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    waits = []
    for _ in range(30):
        server.world.objects["Deployment", "demo-router"]["spec"]["replicas"] = 9
        waits.append(await subject.reconcile(KEY))
    assert server.calls.count("apply Deployment") == MAX_REPAIRS
    assert server.calls.count("event ChildApplied") == 1
    assert waits[-1] == WINDOW_SECONDS


async def test_a_change_of_the_spec_is_acted_on_while_repairs_pause() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    assert server.raw is not None
    for _ in range(MAX_REPAIRS + 1):
        server.world.objects["Deployment", "demo-router"]["spec"]["replicas"] = 9
        await subject.reconcile(KEY)
    paused = server.condition(names.PROGRESSING)
    assert (paused["status"], paused["reason"]) == ("False", names.REASON_REPAIRS_PAUSED)
    assert "Deployment demo-router" in paused["message"]
    server.raw["spec"]["router"] = {"replicas": 2}
    server.raw["metadata"]["generation"] = 2
    await subject.reconcile(KEY)
    assert server.world.objects["Deployment", "demo-router"]["spec"]["replicas"] == 2


async def test_nothing_is_made_once_the_deployment_is_being_deleted() -> None:
    server = FakeServer()
    apply = server.apply

    async def apply_and_delete(body: dict[str, Any], field_manager: str) -> dict[str, Any]:
        assert server.raw is not None
        server.raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return await apply(body, field_manager)

    server.apply = apply_and_delete  # type: ignore[method-assign]
    assert await reconciler(server).reconcile(KEY) is None
    assert len(server.calls) == 1


async def test_a_refusal_is_an_event_once_however_often_it_is_tried_again() -> None:
    server = FakeServer()
    server.refuse = "Pod"
    subject = reconciler(server)
    for _ in range(3):
        with pytest.raises(ClusterError):
            await subject.reconcile(KEY)
    assert server.calls.count(f"event {names.REASON_REFUSED}") == 1
    assert server.calls.count("event GroupCreated") == 2  # one for each role's group


async def test_a_corrupt_status_is_computed_anew() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    good = copy.deepcopy(server.raw or {})["status"]
    assert server.raw is not None
    server.raw["status"] = {"roles": [{"name": "prefill", "readyGroups": 77}]}
    await subject.reconcile(KEY)
    assert server.raw["status"]["roles"] == good["roles"]
    assert server.condition(names.READY)["status"] == "True"


async def test_after_a_pass_a_deployment_rests_and_once_it_is_gone_its_successor_does_not() -> None:
    server = FakeServer({"spec.roles.0.replicas": 120})
    now = 100.0
    inventory = Inventory(server, lambda key: None)  # type: ignore[arg-type]
    subject = Reconciler(server, server, inventory, DEFAULTS, clock=lambda: now)  # type: ignore[arg-type]
    assert subject.rest_seconds(KEY) is None
    await subject.reconcile(KEY)
    rest = subject.rest_seconds(KEY)
    assert rest is not None
    assert 0 < rest <= MAX_REST_SECONDS
    now += rest
    assert subject.rest_seconds(KEY) is None
    await subject.reconcile(KEY)
    assert subject.rest_seconds(KEY) is not None
    server.raw = None
    server.world.objects.clear()
    await subject.reconcile(KEY)
    assert subject.rest_seconds(KEY) is None


def removed_by_force(server: FakeServer) -> str:
    """A decode pod that only Kueue's finalizer keeps; its name."""
    name, body = next((name, body) for name, body in server.world.pods().items() if "-decode-" in name)
    body["spec"]["nodeName"] = "node-a"
    body["status"] = {"phase": "Running"}
    body["metadata"] |= {
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 0,
        "finalizers": [names.FINALIZER_KUEUE],
    }
    return name


@pytest.mark.parametrize("life", ["there to stay", "going", "gone"])
async def test_a_pod_that_only_kueue_holds_is_let_go_whatever_becomes_of_its_deployment(life: str) -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    name = removed_by_force(server)
    assert server.raw is not None
    if life == "going":
        server.raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    elif life == "gone":
        server.raw = None
    await subject.reconcile(KEY)
    assert server.calls.count("finalizers []") == 1
    assert ("Pod", name) not in server.world.objects


async def test_a_pod_that_cannot_be_let_go_keeps_nothing_else_from_being_done() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    removed_by_force(server)
    server.refuse = "finalizers"
    wait = await subject.reconcile(KEY)
    assert wait is not None
    assert wait <= RETRY_SECONDS
    assert "status" in server.calls
