"""A deployment between two caches: groups say which one they have, and requests go to pairs."""

from __future__ import annotations

import pytest
from tests.router.fakes import Rig, rig, token_event, wait_until

from headrace_engine.core import Role
from headrace_engine.router import fingerprints

STREAM = b"".join(map(token_event, "abc")) + b"data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(fingerprints, "RETRY_SECONDS", 0.02)


def known(r: Rig) -> set[str]:
    return {group.fingerprint for group in r.router.fleet.groups()}


async def test_nobody_without_a_partner_is_asked_in_vain():
    told = {Role.PREFILL: ["F3", "F1"], Role.DECODE: ["F2", "F1", "F1"]}
    async with rig(num_prefill=2, num_decode=3, fingerprints=told) as r:
        await wait_until(lambda: "" not in known(r))
        for _ in range(6):
            assert (await r.ask(stream=True))[1] == STREAM
        assert [engine.num_legs for engine in r.prefill] == [0, 6]
        assert [engine.num_legs for engine in r.decode] == [0, 3, 3]


async def test_both_kinds_serve_side_by_side_once_each_has_a_pair():
    told = {Role.PREFILL: ["F1", "F2"], Role.DECODE: ["F1", "F2"]}
    async with rig(num_prefill=2, num_decode=2, fingerprints=told) as r:
        await wait_until(lambda: "" not in known(r))
        for _ in range(6):
            assert (await r.ask(stream=True))[1] == STREAM
        assert [engine.num_legs for engine in r.engines] == [3, 3, 3, 3]


async def test_an_engine_that_does_not_say_serves_and_is_asked_again():
    async with rig() as r:
        assert (await r.ask(stream=True))[1] == STREAM
        assert known(r) == {""}
        for engine in r.engines:
            engine.tells_fingerprint = True
        await wait_until(lambda: known(r) == {"F1"})
