"""Forecasts of roll-outs, and `headrace plan-rollout`, which prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.role_worlds import Wanted, World
from tests.operator.rule_cases import resource
from tests.operator.worlds import UID, FakeCluster, stored

from headrace_operator import cli
from headrace_operator.forecast import Forecast
from headrace_operator.forecast import forecast as forecast_in
from headrace_operator.forecast_room import CountedRoom, in_use
from headrace_operator.groups import Strategy
from headrace_operator.status import as_applied

SURGE = Strategy(max_surge=1, max_unavailable=0)


def forecast(world: World, wanted: dict[str, Wanted], num_free: int | None = None) -> Forecast:
    states = world.states(wanted)
    room = CountedRoom(world.strategy, None if num_free is None else in_use(states) + num_free)
    return forecast_in(states, room, world.now)


def lines(result: Forecast) -> list[list[str]]:
    return [
        [f"{action.verb} {action.group.role} {action.group.revision}{action.group.index}" for action in step.actions]
        for step in result.steps
    ]


def pd(prefill: int, decode: int, revision: str = "a") -> dict[str, Wanted]:
    """Prefill groups of 1 GPU, decode groups of 4 on two pods."""
    return {"prefill": Wanted(revision, prefill), "decode": Wanted(revision, decode, size=2, gpus=4)}


def test_in_place_an_old_group_goes_and_a_new_one_follows() -> None:
    world = World()
    world.settle({"decode": Wanted("a", 2)})
    result = forecast(world, {"decode": Wanted("b", 2)})
    assert lines(result) == [["remove decode a1"], ["make decode b1"], ["remove decode a0"], ["make decode b0"]]
    assert [dict(step.available)["decode"] for step in result.steps] == [1, 1, 1, 1]
    assert result.blocked == ()


def test_with_surge_it_is_the_other_way_round() -> None:
    world = World(SURGE)
    world.settle({"decode": Wanted("a", 1)})
    result = forecast(world, {"decode": Wanted("b", 1)})
    assert lines(result) == [["make decode b0"], ["remove decode a0"]]
    assert [step.num_in_use for step in result.steps] == [2, 2]


def test_what_stops_a_rollout_on_a_full_rack_is_known_before() -> None:
    world = World(SURGE)
    world.settle(pd(8, 1))
    result = forecast(world, pd(8, 1, "b"), num_free=0)
    assert result.steps == ()
    assert any("set whenFull: Recreate" in reason for reason in result.blocked)


def test_a_new_ratio_shrinks_first_and_never_needs_more_than_there_is() -> None:
    world = World()
    world.settle(pd(8, 1))
    result = forecast(world, pd(4, 2), num_free=0)
    assert lines(result) == [[f"remove prefill a{i}" for i in (4, 5, 6, 7)], ["make decode a1"]]
    assert max(step.num_in_use for step in result.steps) == 12
    assert result.blocked == ()


@pytest.mark.parametrize("strategy", [Strategy(), SURGE, Strategy(max_surge=2, max_unavailable=1)])
def test_the_operator_takes_the_steps_that_were_forecast(strategy: Strategy) -> None:
    world = World(strategy)
    world.settle(pd(3, 2))
    expected = forecast(world, pd(4, 2, "b"))
    taken = []
    while not world.is_settled(pd(4, 2, "b")):
        before = {pod.uid: key for key, pods in world.groups.items() for pod in pods}
        for plan in world.step(pd(4, 2, "b")).values():
            taken += [("remove", key) for key in dict.fromkeys(before[deletion.uid] for deletion in plan.delete)]
            taken += [("make", creation.key) for creation in plan.create]
    assert sorted(taken) == sorted((action.verb, action.group) for step in expected.steps for action in step.actions)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A file with a new spec, and the objects of the deployment that it is to change."""
    cluster = FakeCluster()
    cluster.settle(stored())
    live: dict[str, Any] = resource()
    live["metadata"]["uid"] = UID
    live["status"] = as_applied(cluster.status)
    state, new = tmp_path / "state.yaml", tmp_path / "new.yaml"
    state.write_text(yaml.safe_dump({"kind": "List", "items": [live, *cluster.objects.values()]}))
    new.write_text(yaml.safe_dump(resource({"spec.roles.1.template": {"labels": {"x": "1"}}})))
    return new, state


def test_plan_rollout_prints_the_steps_of_one_role_only(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path]
) -> None:
    code, out, _ = run(capsys, "plan-rollout", str(files[0]), "--state", str(files[1]))
    assert code == 0
    assert out.startswith(
        "demo: 2 steps\n1. meanwhile available: prefill 1, decode 0; in use: 2 pods\n   remove decode"
    )
    assert "make   decode group 0" in out
    assert "prefill group" not in out


def test_plan_rollout_speaks_json(capsys: pytest.CaptureFixture[str], files: tuple[Path, Path]) -> None:
    code, out, _ = run(capsys, "plan-rollout", str(files[0]), "--state", str(files[1]), "-o", "json")
    assert code == 0
    data = json.loads(out)
    assert [action["verb"] for step in data["steps"] for action in step["actions"]] == ["remove", "make"]
    assert (data["blocked"], data["unit"]) == ([], "pods")


def test_plan_rollout_of_what_is_there_has_nothing_to_do(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    same = tmp_path / "same.yaml"
    same.write_text(yaml.safe_dump(resource()))
    assert run(capsys, "plan-rollout", str(same), "--state", str(files[1]))[:2] == (0, "demo: nothing to do\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("items: []", "has no objects"),
        ("items:", "has no objects"),
        ("{kind: Node, metadata: n1}", "the metadata of a Node is no object"),
        ("{kind: DisaggDeployment, metadata: {name: demo}}", "demo has no metadata.uid"),
        ("items: [", "not YAML"),
    ],
)
def test_plan_rollout_refuses_a_state_that_kubectl_would_not_print(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path], tmp_path: Path, text: str, message: str
) -> None:
    state = tmp_path / "wrong.yaml"
    state.write_text(text)
    code, _, err = run(capsys, "plan-rollout", str(files[0]), "--state", str(state))
    assert code == 2
    assert f"{state}: {message}" in err


def test_plan_rollout_reckons_with_the_nodes_of_a_state(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path]
) -> None:
    document = yaml.safe_load(files[1].read_text())
    for pod in (body for body in document["items"] if body["kind"] == "Pod"):
        pod["spec"]["nodeName"] = "n1"
    node = {"kind": "Node", "metadata": {"name": "n1"}, "status": {"allocatable": {"pods": 1}}}
    files[1].write_text(yaml.safe_dump_all([document, {"kind": "List", "items": [node]}]))
    code, out, _ = run(capsys, "plan-rollout", str(files[0]), "--state", str(files[1]))
    assert code == 1
    assert "stops there: NoCapacity: decode needs 1 pods; the nodes that it may use have 0" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "Node", "metadata": {"name": "n1"}, "status": {"allocatable": {"pods": "x"}}}, "Node n1 is not as"),
        ({"kind": "DisaggDeployment", "metadata": {"name": "demo", "namespace": "b"}}, "-n says which namespace"),
    ],
)
def test_plan_rollout_refuses_a_state_that_it_cannot_read(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path], more: dict[str, Any], message: str
) -> None:
    files[1].write_text(files[1].read_text() + "\n---\n" + yaml.safe_dump(more))
    code, _, err = run(capsys, "plan-rollout", str(files[0]), "--state", str(files[1]))
    assert (code, message in err) == (2, True), err


def test_plan_rollout_exits_with_1_when_the_change_would_not_come_to_its_end(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    paused = tmp_path / "paused.yaml"
    paused.write_text(yaml.safe_dump(resource({"spec.engine": {"maxSequences": 8}, "spec.paused": True})))
    code, out, _ = run(capsys, "plan-rollout", str(paused), "--state", str(files[1]))
    assert code == 1
    assert "stops there: Paused: the roll-out of decode is paused" in out
