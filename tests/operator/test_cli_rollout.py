"""`headrace rollout undo` and `plan-rollout` over a stand-in for the API server: what they ask, write and say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.rule_cases import resource
from tests.operator.test_api import SCHEMA, with_defaults
from tests.operator.worlds import UID, FakeCluster, stored

from headrace_operator import cli, names
from headrace_operator.cluster_errors import Refused
from headrace_operator.status import as_applied

A: dict[str, Any] = {}
B: dict[str, Any] = {"spec.engine": {"maxSequences": 8}}


class Server:
    """A deployment that was A and is B, as the API server stores it: with its defaults written out."""

    def __init__(self) -> None:
        self.namespace = "serving"
        self.world = FakeCluster()
        for generation, changes in enumerate((A, B), start=1):
            self.world.settle(stored(changes, generation))
        self.body = with_defaults(SCHEMA, resource(B))
        self.body["metadata"] |= {"namespace": "serving", "uid": UID, "generation": 2}
        self.body["status"] = as_applied(self.world.status)
        self.listed: list[str] = []
        self.refused: tuple[str, ...] = ()  # kinds that may not be listed everywhere
        self.node = {"metadata": {"name": "n1"}, "status": {"allocatable": {"pods": 3}}}
        for child in self.world.objects.values():
            child["metadata"]["namespace"] = "serving"
        for pod in self.world.pods().values():
            pod["spec"]["nodeName"] = "n1"

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.body if (kind, namespace, name) == (names.KIND, "serving", "demo") else None

    async def list_children(self, kind: str, namespace: str, name: str) -> list[dict[str, Any]]:
        self.listed.append(kind)
        return [body for (of, _), body in self.world.objects.items() if of == kind]

    async def list_page(self, kind: str, token: str | None, namespace: str | None, selector: str | None) -> Any:
        assert (namespace, selector) == (None, None)
        self.listed.append(f"every {kind}")
        if kind in self.refused:
            raise Refused(f"list {kind}: you cannot")
        if kind == "Node":
            return {"items": [self.node]}
        pods = list(self.world.pods().values())
        page = int(token or 0)
        return {"items": pods[page : page + 1], "metadata": {"continue": str(page + 1)} if pods[page + 1 :] else {}}

    async def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        self.body = with_defaults(SCHEMA, body)
        return self.body


@pytest.fixture
def server(connect_to: Callable[[Server], None]) -> Server:
    server = Server()
    connect_to(server)
    return server


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def test_undo_goes_back_in_the_namespace_of_the_context(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "rollout", "undo", "demo") == (0, "demo goes back to revision 1\n")
    assert server.body["spec"]["engine"]["maxSequences"] == 32


def test_undo_to_what_is_there_already_writes_nothing(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.body
    code, said = run(capsys, "rollout", "undo", "demo", "--to", "2")
    assert (code, said) == (0, "the spec is that of revision 2 already: nothing to do\n")
    assert server.body is before


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What is there, with one field changed."""
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(resource({"spec.engine": {"maxSequences": 9}})))
    return path


def test_a_plan_asks_only_for_what_it_needs(server: Server, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "plan-rollout", str(file))
    assert (code, said.splitlines()[0]) == (0, "demo: 2 steps")
    assert server.listed == ["every Node", "every Pod", "every Pod", "Pod", "ControllerRevision"]
    assert "taken for granted" not in said


def test_a_plan_of_what_does_not_exist_says_so(server: Server, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.node["status"] = {"allocatable": {"pods": 4}}
    code, said = run(capsys, "plan-rollout", str(file), "-n", "elsewhere")
    assert (code, said.splitlines()[0]) == (0, "demo (which does not exist yet): 1 step")


@pytest.fixture
def surge(tmp_path: Path) -> Path:
    """What is there with one field changed, a new group to be made before the old one goes."""
    path = tmp_path / "surge.yaml"
    strategy = {"maxSurge": 1, "maxUnavailable": 0}
    changes = {"spec.engine": {"maxSequences": 9}, "spec.rolloutStrategy": strategy, "spec.placement": {}}
    path.write_text(yaml.safe_dump(resource(changes)))
    return path


def test_a_plan_says_for_what_room_of_the_nodes_it_waits(
    server: Server, surge: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.node["status"] = {"allocatable": {"pods": 2}}
    code, said = run(capsys, "plan-rollout", str(surge))
    assert (code, said.splitlines()[0]) == (1, "demo: no step can be taken")
    assert "stops there: NoCapacity: prefill needs 1 pods; the nodes that it may use have 0" in said


def test_programs_are_told_of_the_room_too(server: Server, surge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "plan-rollout", str(surge), "-o", "json")
    data = json.loads(said)
    assert (code, data["room"], data["blocked"]) == (0, "nodes", [])
    shortages = [step["shortage"] for step in data["steps"]]
    assert shortages == ["decode needs 1 pods; the nodes that it may use have 0"] * 2 + ["", ""]


@pytest.mark.parametrize(
    ("refused", "told"),
    [(("Node",), "the nodes of"), (("Pod",), "the pods of"), (("Node", "Pod"), "the nodes and pods of")],
)
def test_without_the_right_to_see_the_nodes_a_plan_takes_room_for_granted_and_says_so(
    server: Server, surge: Path, capsys: pytest.CaptureFixture[str], refused: tuple[str, ...], told: str
) -> None:
    server.refused = refused
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan-rollout", str(surge)])
    captured = capsys.readouterr()
    assert ended.value.code == 0
    (line,) = captured.err.splitlines()
    assert f"you may not list {told} the whole cluster (list {refused[0]}: you cannot" in line
    assert "room for all of it is taken for granted" in captured.out


def test_a_number_is_taken_in_place_of_the_nodes(
    server: Server, surge: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "plan-rollout", str(surge), "--free", "0")
    assert (code, said.splitlines()[0]) == (1, "demo: no step can be taken")
    assert "it needs 1 pod, 0 of 2 are free" in said
    assert server.listed == ["Pod", "ControllerRevision"]
