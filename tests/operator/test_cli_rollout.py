"""`headrace rollout undo` and `plan-rollout` over a stand-in for the API server: what they ask, write and say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.rule_cases import resource
from tests.operator.test_api import SCHEMA, with_defaults
from tests.operator.worlds import UID, FakeCluster, stored

from headrace_operator import cli, names
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

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.body if (kind, namespace, name) == (names.KIND, "serving", "demo") else None

    async def list_children(self, kind: str, namespace: str, name: str) -> list[dict[str, Any]]:
        self.listed.append(kind)
        return [body for (of, _), body in self.world.objects.items() if of == kind]

    async def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        self.body = with_defaults(SCHEMA, body)
        return self.body


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()

    @asynccontextmanager
    async def connect(context: str | None) -> AsyncIterator[Server]:
        yield server

    monkeypatch.setattr("headrace_operator.connection.connect", connect)
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
    assert server.listed == ["Pod", "ControllerRevision"]
    assert "room for all of it is taken for granted" in said


def test_a_plan_of_what_does_not_exist_says_so(server: Server, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "plan-rollout", str(file), "-n", "elsewhere")
    assert (code, said.splitlines()[0]) == (0, "demo (which does not exist yet): 1 step")


def test_a_plan_without_room_says_what_is_missing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "surge.yaml"
    strategy = {"maxSurge": 1, "maxUnavailable": 0}
    path.write_text(yaml.safe_dump(resource({"spec.engine": {"maxSequences": 9}, "spec.rolloutStrategy": strategy})))
    code, said = run(capsys, "plan-rollout", str(path), "--free", "0")
    assert (code, said.splitlines()[0]) == (1, "demo: no step can be taken")
    assert "it needs 1 pod, 0 of 2 are free" in said
