"""Taking groups out of service before they are deleted: single steps, then a reconciler over real HTTP engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.operator.rule_cases import resource
from tests.operator.test_reconcile import KEY, FakeServer
from tests.operator.worlds import DEFAULTS

from headrace_operator import names
from headrace_operator.drain import POLL_SECONDS, SETTLE_SECONDS, Drains, GateChange, plan_drains, worth_asking
from headrace_operator.engines import Engines, load_of
from headrace_operator.groups import Gate, GroupKey, Load, Pod
from headrace_operator.inventory import Inventory
from headrace_operator.plans import Deletion
from headrace_operator.reconcile import Reconciler

NOW = 1000.0
TIMEOUT = 60.0
KEY0 = GroupKey("decode", "r", 0)
LEADER = Pod("p0", "u0", 0, "Running", True, is_well=True, gate=Gate.OPEN, gate_since=0.0)
FOLLOWER = Pod("p1", "u1", 1, "Running", True, is_well=True)
WHOLE = (Deletion("p0", "u0", None), Deletion("p1", "u1", None))
BUSY, IDLE = Load(2, 1), Load(0, 0)
OPEN, CLOSE = GateChange("p0", "u0", is_open=True), GateChange("p0", "u0", is_open=False)


def shut(seconds_ago: float) -> Pod:
    return replace(LEADER, is_ready=False, gate=Gate.CLOSED, gate_since=NOW - seconds_ago)


def plan(leader: Pod, follower: Pod = FOLLOWER, planned: tuple[Deletion, ...] = (), load: Load | None = None) -> Drains:
    loads = {KEY0: load} if load else {}
    return plan_drains({KEY0: (leader, follower)}, planned, loads, TIMEOUT, NOW)


@pytest.mark.parametrize(
    ("leader", "follower", "gates"),
    [
        (replace(LEADER, gate=Gate.UNSET), FOLLOWER, (OPEN,)),
        (replace(LEADER, gate=Gate.UNSET, is_well=False), FOLLOWER, ()),
        (replace(LEADER, gate=Gate.UNSET), replace(FOLLOWER, is_well=False), ()),
        (LEADER, FOLLOWER, ()),
        (LEADER, replace(FOLLOWER, is_well=False), ()),  # a gate that is open stays so: its engine says if it is ready
        (shut(5), FOLLOWER, (OPEN,)),
        (replace(LEADER, gate=Gate.NONE), FOLLOWER, ()),
        (replace(LEADER, gate=Gate.UNSET), replace(FOLLOWER, deadline=NOW), ()),
    ],
    ids=[
        "all pods are well",
        "the leader is not",
        "a follower is not",
        "in service",
        "in service with a poor follower",
        "the plan has changed: back into service",
        "made by an older operator",
        "on its way out",
    ],
)
def test_a_group_that_stays_comes_into_service_when(leader: Pod, follower: Pod, gates: tuple[GateChange, ...]) -> None:
    assert plan(leader, follower) == Drains((), gates)


@pytest.mark.parametrize(
    ("leader", "load", "expected"),
    [
        (LEADER, BUSY, Drains((), (CLOSE,), (), {KEY0: "it is taken out of service"}, SETTLE_SECONDS)),
        (shut(0.5), IDLE, Drains((), (), (), {KEY0: "routers are forgetting it"}, SETTLE_SECONDS - 0.5)),
        (shut(5), BUSY, Drains((), (), (), {KEY0: "2 requests and 1 KV pushes under way"}, POLL_SECONDS)),
        (shut(5), Load(0, 1), Drains((), (), (), {KEY0: "0 requests and 1 KV pushes under way"}, POLL_SECONDS)),
        (shut(5), IDLE, Drains(WHOLE)),
        (shut(5), None, Drains(WHOLE)),
        (shut(TIMEOUT), BUSY, Drains(WHOLE, hurry=(KEY0,))),
        (replace(LEADER, gate=Gate.UNSET), None, Drains(WHOLE)),
        (replace(LEADER, gate=Gate.NONE), None, Drains(WHOLE)),
    ],
    ids=[
        "in service: its gate is closed",
        "just closed: routers need a moment",
        "busy: it is waited for",
        "only pushing: it is waited for",
        "idle: it is deleted",
        "no answer: it is deleted and drains by itself",
        "out of time: what is left ends with an error",
        "never in service: it is deleted",
        "made by an older operator: it is deleted",
    ],
)
def test_a_group_that_goes(leader: Pod, load: Load | None, expected: Drains) -> None:
    assert plan(leader, planned=WHOLE, load=load) == expected


@pytest.mark.parametrize(
    ("follower", "planned"),
    [
        (FOLLOWER, (Deletion("p0", "u0", 5), Deletion("p1", "u1", 5))),
        (replace(FOLLOWER, deadline=NOW), (Deletion("p0", "u0", None),)),
    ],
    ids=["broken", "already going"],
)
def test_nothing_is_held_back_of_a_group_that_cannot_serve(follower: Pod, planned: tuple[Deletion, ...]) -> None:
    assert plan(LEADER, follower, planned).delete == planned


OTHER = GroupKey("decode", "r", 1)


@pytest.mark.parametrize(
    ("leaders", "replicas", "asked"),
    [
        ((LEADER, LEADER), 2, []),
        ((shut(1), LEADER), 2, [KEY0]),
        ((replace(shut(1), deadline=NOW), LEADER), 2, []),
        ((LEADER, LEADER), 1, [KEY0, OTHER]),
        ((LEADER, replace(LEADER, gate=Gate.UNSET)), 1, []),
        ((LEADER, LEADER), 0, []),
    ],
    ids=[
        "all stay",
        "one is out of service",
        "one is being deleted",
        "one of two may go: which?",
        "the other does not serve: it goes",
        "all go: there is no choice",
    ],
)
def test_engines_are_asked_only_where_it_matters(
    leaders: tuple[Pod, Pod], replicas: int, asked: list[GroupKey]
) -> None:
    groups = {KEY0: (leaders[0], FOLLOWER), OTHER: (leaders[1], FOLLOWER)}
    assert worth_asking(groups, {"decode": replicas}) == asked


@pytest.mark.parametrize("state", [None, [], {}, {"in_flight": 1}, {"in_flight": "x", "ranks": []}, {"ranks": [1]}])
def test_what_is_no_state_of_an_engine_says_nothing(state: Any) -> None:
    assert load_of(state) is None


# --- over HTTP ---


class Engine:
    """The two routes of an engine that matter here."""

    def __init__(self) -> None:
        self.state = {"in_flight": 3, "ranks": [{"num_pushing": 1, "num_waiting_for_kv": 2}, {}]}
        self.hurried: list[str] = []

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(self.state)

    async def _drain(self, request: web.Request) -> web.Response:
        self.hurried.append(request.query_string)
        return web.json_response({})

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/state", self._state), web.post("/drain", self._drain)])
        return app


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Engine, str]]:
    engine = Engine()
    async with TestServer(engine.app()) as server:
        yield engine, f"127.0.0.1:{server.port}"


async def test_engines_are_asked_what_they_have_and_the_dead_say_nothing(engine: tuple[Engine, str]) -> None:
    fake, address = engine
    dead = GroupKey("decode", "r", 1)
    async with Engines() as engines:
        assert await engines.loads({KEY0: address, dead: "127.0.0.1:1"}) == {KEY0: Load(3, 3)}
        await engines.hurry(address)
        await engines.hurry("127.0.0.1:1")
    assert fake.hurried == ["seconds=0"]


class Asked(Engines):
    """Says what it is told to, for every group that is asked for."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.of_index: dict[int, Load] = {}
        self.hurried: list[str] = []

    async def loads(self, addresses: Any) -> dict[GroupKey, Load]:
        return {key: self.of_index.get(key.index, self.load) for key in addresses}

    async def hurry(self, address: str) -> None:
        self.hurried.append(address)


def in_service(server: FakeServer) -> None:
    """Kubelets: what is ready and has its gate open is Ready."""
    for pod in server.world.pods().values():
        conditions = {c["type"]: c for c in pod.get("status", {}).get("conditions", ())}
        gated = bool(pod["spec"].get("readinessGates"))
        is_open = conditions.get(names.GATE_SERVING, {}).get("status") == "True"
        conditions["ContainersReady"] = {"type": "ContainersReady", "status": "True"}
        conditions["Ready"] = {"type": "Ready", "status": "True" if is_open or not gated else "False"}
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": list(conditions.values())}
    for (kind, _), body in server.world.objects.items():
        if kind == "Deployment":
            body["status"] = {"observedGeneration": 1, "availableReplicas": 1, "updatedReplicas": 1}


async def test_a_group_that_is_scaled_away_serves_to_its_last_request() -> None:
    server, now, engines = FakeServer({"spec.roles.0.replicas": 2}), [NOW], Asked(BUSY)
    inventory = Inventory(server, lambda key: None)  # type: ignore[arg-type]
    subject = Reconciler(server, server, inventory, DEFAULTS, lambda: now[0], engines)  # type: ignore[arg-type]

    async def steps(seconds: int) -> None:
        for _ in range(seconds):
            in_service(server)
            await subject.reconcile(KEY)
            now[0] += 1.0

    await steps(5)
    assert server.condition(names.READY)["status"] == "True"
    assert server.calls.count("gate True") == 3
    server.calls.clear()
    await steps(3)
    assert server.calls == []

    assert server.raw is not None
    changed = resource({"spec.drainTimeoutSeconds": 30})
    server.raw = {**server.raw, "spec": {**changed["spec"], "drainTimeoutSeconds": 120}}  # one group fewer
    server.raw["metadata"] = {**server.raw["metadata"], "generation": 2}
    await steps(20)
    assert server.calls.count("gate False") == 1
    assert "delete Pod" not in server.calls
    assert server.condition(names.PROGRESSING)["reason"] == names.REASON_DRAINING
    assert "2 requests" in server.condition(names.PROGRESSING)["message"]
    engines.load = IDLE
    await steps(3)
    assert server.calls.count("delete Pod") == 1
    assert engines.hurried == []
    assert server.condition(names.READY)["status"] == "True"


async def test_of_groups_that_serve_the_one_with_the_fewest_requests_goes() -> None:
    server, now, engines = FakeServer({"spec.roles.0.replicas": 3}), [NOW], Asked(BUSY)
    inventory = Inventory(server, lambda key: None)  # type: ignore[arg-type]
    subject = Reconciler(server, server, inventory, DEFAULTS, lambda: now[0], engines)  # type: ignore[arg-type]

    async def steps(seconds: int) -> None:
        for _ in range(seconds):
            in_service(server)
            await subject.reconcile(KEY)
            now[0] += 1.0

    await steps(5)
    engines.of_index = {1: Load(1, 0)}
    assert server.raw is not None
    server.raw = {**server.raw, "spec": resource({"spec.roles.0.replicas": 2})["spec"]}
    server.raw["metadata"] = {**server.raw["metadata"], "generation": 2}
    await steps(3)
    engines.of_index = {1: IDLE, 0: Load(1, 0)}  # it stays the one, whatever the others have by now
    await steps(5)
    left = {name.rsplit("-", 2)[1] for name in server.world.pods() if "-prefill-" in name}
    assert left == {"0", "2"}
    assert server.calls.count("gate False") == 1
