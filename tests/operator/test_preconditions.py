"""What the operator waits for before it works, and what it refuses to start without."""

from __future__ import annotations

import asyncio

import pytest

from headrace_operator import names, preconditions
from headrace_operator.cluster import ClusterError, Refused
from headrace_operator.preconditions import wait_until_usable


class FakeServer:
    """Answers from `answers`, by (kind, namespace); what is not in there is served."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str | None], list[bool | ClusterError]] = {}

    async def is_served(self, kind: str, namespace: str | None) -> bool:
        answers = self.answers.get((kind, namespace))
        answer = answers.pop(0) if answers else True
        if isinstance(answer, ClusterError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "POLL_SECONDS", 0.0)


async def is_usable(server: FakeServer, *namespaces: str) -> bool:
    return await wait_until_usable(server, namespaces or None, asyncio.Event())  # type: ignore[arg-type]


async def test_it_waits_for_the_api_server_and_for_the_crds(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    server.answers[names.KIND, None] = [ClusterError("no answer"), ClusterError("no answer"), False, True]
    assert await is_usable(server)
    said = [record.message for record in caplog.records]
    assert len(said) == 2, "each reason once"
    assert "no answer" in said[0]
    assert said[1].endswith("disaggdeployments.headrace.dev")


async def test_it_can_be_stopped_while_it_waits() -> None:
    server, stop = FakeServer(), asyncio.Event()
    server.answers[names.KIND, None] = [False]
    stop.set()
    assert not await wait_until_usable(server, None, stop)  # type: ignore[arg-type]


async def test_a_namespace_in_which_it_may_not_look_is_named_with_the_right_and_what_to_do() -> None:
    server = FakeServer()
    server.answers["Pod", "team-b"] = [Refused('list Pod: pods is forbidden: cannot list resource "pods"')]
    with pytest.raises(Refused) as raised:
        await is_usable(server, "team-a", "team-b")
    assert str(raised.value) == (
        'rights are missing: list Pod: pods is forbidden: cannot list resource "pods". To do: list team-b in '
        "watchNamespaces of the chart, which grants them, or do not name it with --namespace"
    )


async def test_many_missing_rights_are_told_in_few_words() -> None:
    server = FakeServer()
    for kind in preconditions.CHILD_KINDS:
        server.answers[kind, None] = [Refused(f"list {kind}: forbidden")]
    with pytest.raises(Refused, match=r"and \d+ more\)\. To do: install the chart without watchNamespaces"):
        await is_usable(server)


async def test_an_api_server_that_goes_away_while_it_asks_is_waited_for() -> None:
    server = FakeServer()
    server.answers["Pod", None] = [ClusterError("no answer")]
    assert await is_usable(server)
