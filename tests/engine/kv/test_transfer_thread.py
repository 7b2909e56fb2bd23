"""The agent's thread: how it starts, wakes its rank loop, idles, dies and ends."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.kv.rank_process import BLOCK_SIZE, Cache, make_agent

from headrace_engine.kv import transfer
from headrace_engine.kv.events import PushDone
from headrace_engine.kv.nixl import NixlTransport, TransportError
from headrace_engine.kv.receive import Received, ReceiveFailed
from headrace_engine.kv.transfer import TransferAgent, TransferThreadError

TIMEOUT_SECONDS = 20.0


def start(name: str = "rank-0", wake: Callable[[], None] | None = None) -> TransferAgent:
    return make_agent(Cache(fill=1), name, uuid.uuid4().hex, lease_seconds=30.0, wake=wake)


def wait_for_event(agent: TransferAgent) -> Any:
    give_up_at = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < give_up_at:
        for event in agent.poll_events():
            return event
        time.sleep(0.001)
    raise AssertionError("no event has come")


def test_the_rank_loop_is_woken_for_each_side_of_a_push() -> None:
    wakes = threading.Semaphore(0)
    decode, prefill = start("decode-0", wakes.release), start("prefill-0", wakes.release)
    try:
        token_ids = list(range(BLOCK_SIZE + 1))
        ticket = decode.issue_ticket("r-1", token_ids, 0, [5], 2)
        key = prefill.open_push(ticket, token_ids)
        prefill.push_blocks(key, 0, [1])
        prefill.finish_push(key, 0, 16)
        assert wakes.acquire(timeout=TIMEOUT_SECONDS)
        assert wakes.acquire(timeout=TIMEOUT_SECONDS)
        assert wait_for_event(decode) == Received(1, "r-1", 16)
        assert isinstance(wait_for_event(prefill), PushDone)
        assert prefill.stats().num_pushes_total == decode.stats().num_receives_total == 1
        assert prefill.stats().pushed_bytes_total == 4096 + 512 + 2048 + 96
        assert prefill.stats().oldest_age_seconds == decode.stats().oldest_age_seconds == 0.0
    finally:
        prefill.close()
        decode.close()


def test_a_ticket_issued_while_decode_looks_for_mail_is_known_when_its_mail_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look for mail takes long when a new peer connects, and may bring what a ticket of that time has led to."""
    is_slow, has_begun = threading.Event(), threading.Event()
    look = NixlTransport.notifications

    def look_until_mail_comes(transport: NixlTransport) -> list[tuple[str, bytes]]:
        if not (is_slow.is_set() and transport.peer.agent_name.startswith("decode-0/")):
            return look(transport)
        has_begun.set()
        give_up_at = time.monotonic() + TIMEOUT_SECONDS
        while not (mail := look(transport)) and time.monotonic() < give_up_at:
            time.sleep(0.001)
        is_slow.clear()
        return mail

    monkeypatch.setattr(NixlTransport, "notifications", look_until_mail_comes)
    decode, prefill = start("decode-0"), start("prefill-0")
    try:
        is_slow.set()
        assert has_begun.wait(TIMEOUT_SECONDS)
        token_ids = list(range(BLOCK_SIZE + 1))
        key = prefill.open_push(decode.issue_ticket("r-1", token_ids, 0, [5], 2), token_ids)
        prefill.push_blocks(key, 0, [1])
        prefill.finish_push(key, 0, 16)
        assert wait_for_event(decode) == Received(1, "r-1", 16)
    finally:
        prefill.close()
        decode.close()


def test_a_ticket_that_no_prefill_ever_takes_fails_after_a_lease() -> None:
    agent = make_agent(Cache(fill=1), "decode-0", "inc", lease_seconds=0.3)
    try:
        started = time.monotonic()
        agent.issue_ticket("r-1", list(range(BLOCK_SIZE)), 0, [5], 2)
        event = wait_for_event(agent)
        assert isinstance(event, ReceiveFailed)
        assert "no prefill engine has taken the ticket" in event.error
        assert time.monotonic() - started >= 0.3
    finally:
        agent.close()


def test_a_ticket_that_nobody_took_is_over_as_soon_as_its_request_is() -> None:
    agent = make_agent(Cache(fill=1), "decode-0", "inc", lease_seconds=300.0)
    try:
        ticket = agent.issue_ticket("r-1", list(range(BLOCK_SIZE)), 0, [5], 2)
        agent.abandon(ticket.generation)
        assert isinstance(wait_for_event(agent), ReceiveFailed)
    finally:
        agent.close()


def test_an_idle_agent_costs_next_to_no_processor_time() -> None:
    agent = start()
    try:
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.2
    finally:
        agent.close()


def test_a_transport_that_cannot_start_fails_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TransportError("NIXL cannot start with UCX: no devices")

    monkeypatch.setattr(transfer, "NixlTransport", refuse)
    with pytest.raises(TransferThreadError, match="no devices"):
        start()


def test_a_dead_thread_is_an_error_at_the_next_call_and_wakes_the_rank_loop() -> None:
    woken = threading.Event()
    agent = start(wake=woken.set)
    agent.finish_push(("nobody", 1), 0, 0)  # unknown, so ignored: it may have ended a moment ago
    time.sleep(0.05)
    assert agent.poll_events() == []
    agent._command(lambda worker: worker.pusher.open(None, 0.0))  # type: ignore[arg-type]
    assert woken.wait(TIMEOUT_SECONDS)
    with pytest.raises(TransferThreadError, match="has died"):
        agent.poll_events()
    agent.close()


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    start().close()
    assert threading.active_count() == before
