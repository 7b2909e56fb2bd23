"""`headrace retry` over a stand-in for the API server: what it writes, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.rule_cases import resource

from headrace_operator import cli, names

TIME = "2026-01-01T00:00:00.000000Z"


class Server:
    """One resource with two failed groups; keeps what is applied to it."""

    def __init__(self) -> None:
        rebuilds = [
            {"role": role, "group": group, "revision": "r", "failures": 6, "lastTime": TIME, "message": "", **more}
            for role, group, more in (("prefill", 2, {}), ("decode", 0, {"givenUp": True}))
        ]
        self.body = {**resource(), "status": {"rebuilds": rebuilds}}
        self.body["metadata"] |= {"namespace": "default", "uid": "u1"}
        self.namespace = "default"
        self.applied: list[tuple[dict[str, Any], str]] = []

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.body if (kind, namespace, name) == (names.KIND, "default", "demo") else None

    async def apply(self, body: dict[str, Any], field_manager: str) -> dict[str, Any]:
        self.applied.append((body, field_manager))
        return body


@pytest.fixture
def server(connect_to: Callable[[Server], None]) -> Server:
    server = Server()
    connect_to(server)
    return server


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["retry", *arguments])
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ([], f"decode/0@{TIME} prefill/2@{TIME}"),
        (["--role", "decode"], f"decode/0@{TIME}"),
        (["--group", "2"], f"prefill/2@{TIME}"),
    ],
)
def test_the_chosen_groups_are_asked_for_on_this_very_object(server: Server, flags: list[str], asked: str) -> None:
    assert run("demo", *flags) == 0
    ((body, manager),) = server.applied
    assert body["metadata"] == {
        "name": "demo",
        "namespace": "default",
        "uid": "u1",
        "annotations": {names.ANNOTATION_RETRY: asked},
    }
    assert body.keys() == {"apiVersion", "kind", "metadata"}
    assert manager == names.CLI_MANAGER != names.MANAGER


def test_nothing_is_written_where_nothing_has_failed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--role", "prefill", "--group", "0") == 0
    assert server.applied == []
    assert "nothing to do" in capsys.readouterr().out


def test_a_name_that_is_not_there_is_an_error(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("other") == 1
    assert "there is no DisaggDeployment other in namespace default" in capsys.readouterr().err
