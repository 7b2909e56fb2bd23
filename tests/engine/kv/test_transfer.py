"""The transfer agent over real NIXL between two processes: one rank here, the other in a child."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tests.engine.kv.rank_process as rank_process
from tests.engine.kv.rank_process import BLOCK_SIZE, Cache, make_agent

from headrace_engine.core import Ticket
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.events import PushDone, PushFailed, TransferEvent
from headrace_engine.kv.receive import ReceiveFailed, ReceiveLost
from headrace_engine.kv.ticket import TicketError, ticket_from_json, ticket_to_json
from headrace_engine.kv.transfer import TransferAgent

TIMEOUT_SECONDS = 20.0


class ChildRank:
    """A rank in a child process, and what it can be asked. One whose name begins with "decode" has an empty cache."""

    def __init__(self, name: str = "decode-0", lease_seconds: float = 30.0) -> None:
        command = [sys.executable, str(Path(rank_process.__file__)), name, uuid.uuid4().hex, str(lease_seconds)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def issue(self, request_id: str, token_ids: list[int], blocks: list[int], slot: int, held: int = 0) -> Ticket:
        return ticket_from_json(
            self.ask(
                "issue",
                arguments={
                    "request_id": request_id,
                    "token_ids": token_ids,
                    "num_held_tokens": held,
                    "block_ids": blocks,
                    "state_slot": slot,
                },
            )
        )

    def event(self, seconds: float = TIMEOUT_SECONDS) -> Any:
        return self.ask("event", seconds=seconds)

    def read(self, group: str, item: int) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.ask("read", group=group, item=item)), dtype=np.uint8)

    def freeze(self) -> None:
        """Stops the process, and returns once it stands still: a signal that was sent is not yet one that arrived."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.thaw()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the decode rank ended with {self.process.poll()}"
        return json.loads(line)


class PrefillRank:
    """The agent under test, with a cache of random bytes."""

    def __init__(self, name: str = "prefill-0", **kwargs: Any) -> None:
        self.cache = Cache(fill=0)
        generator = np.random.default_rng(len(name))
        for array in self.cache.arrays.values():
            array[:] = generator.integers(1, 256, array.shape, dtype=np.uint8)
        self.agent: TransferAgent = make_agent(self.cache, name, uuid.uuid4().hex, 30.0, **kwargs)

    def event(self, seconds: float = TIMEOUT_SECONDS) -> TransferEvent | None:
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at:
            for event in self.agent.poll_events():
                return event
            time.sleep(0.001)
        return None

    def push(
        self, ticket: Ticket, token_ids: list[int], local_blocks: list[int], local_slot: int
    ) -> TransferEvent | None:
        key = self.agent.open_push(ticket, token_ids)
        self.agent.push_blocks(key, 0, local_blocks)
        self.agent.finish_push(key, local_slot, num_cached_tokens=0)
        return self.event()


@pytest.fixture(scope="module")
def prefill() -> Iterator[PrefillRank]:
    rank = PrefillRank()
    yield rank
    rank.agent.close()


@pytest.fixture(scope="module")
def decode() -> Iterator[ChildRank]:
    """Shared by tests that leave it alive; each writes to items of its own."""
    rank = ChildRank()
    yield rank
    rank.close()


@pytest.fixture
def start_decode() -> Iterator[Callable[..., ChildRank]]:
    ranks: list[ChildRank] = []

    def start(*args: Any, **kwargs: Any) -> ChildRank:
        ranks.append(ChildRank(*args, **kwargs))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.close()


def wait_for_event(agent: TransferAgent) -> TransferEvent:
    give_up_at = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < give_up_at:
        for event in agent.poll_events():
            return event
        time.sleep(0.001)
    raise AssertionError("no event has come")


def wait_until_held(rank: PrefillRank | ChildRank) -> None:
    """Decode has granted the leases of this rank's pushes, of which there is one at least."""
    give_up_at = time.monotonic() + TIMEOUT_SECONDS
    while True:
        stats = rank.ask("stats") if isinstance(rank, ChildRank) else vars(rank.agent.stats())
        if stats["num_pushing"] and not stats["num_without_lease"]:
            return
        assert time.monotonic() < give_up_at, "decode does not answer"
        time.sleep(0.01)


def prompt(num_tokens: int) -> list[int]:
    return list(range(7, 7 + num_tokens))


def assert_pushed(
    prefill: PrefillRank, decode: ChildRank, pairs: list[tuple[int, int]], slots: tuple[int, int]
) -> None:
    for group in ("entries", "keys"):
        for local, remote in pairs:
            np.testing.assert_array_equal(decode.read(group, remote), prefill.cache.arrays[group][local])
    for group in ("window", "carry"):
        np.testing.assert_array_equal(decode.read(group, slots[1]), prefill.cache.arrays[group][slots[0]])


def test_blocks_and_state_arrive_before_the_completion(prefill: PrefillRank, decode: ChildRank) -> None:
    token_ids = prompt(4 * BLOCK_SIZE + 3)
    remote = [9, 3, 4, 5, 40]  # partly contiguous
    ticket = decode.issue("r-1", token_ids, remote, slot=2)
    key = prefill.agent.open_push(ticket, token_ids)
    prefill.agent.push_blocks(key, 0, [0, 1, 2])  # a first chunk
    prefill.agent.push_blocks(key, 3, [10, 7])
    prefill.agent.finish_push(key, local_slot=5, num_cached_tokens=16)

    assert decode.event() == {
        "type": "Received",
        "generation": ticket.generation,
        "request_id": "r-1",
        "num_cached_tokens": 16,
    }
    assert_pushed(prefill, decode, list(zip([0, 1, 2, 10, 7], remote, strict=True)), slots=(5, 2))
    done = prefill.event()
    assert isinstance(done, PushDone)
    assert done.num_bytes == 5 * (4096 + 512) + 2048 + 96
    assert not decode.read("entries", 8).any()  # the neighbour of a written block
    assert decode.ask("stats")["num_expected"] == 0


def test_blocks_that_decode_holds_are_not_overwritten(prefill: PrefillRank, decode: ChildRank) -> None:
    token_ids = prompt(3 * BLOCK_SIZE)
    ticket = decode.issue("r-held", token_ids, [20, 21, 22], slot=0, held=2 * BLOCK_SIZE)
    assert isinstance(prefill.push(ticket, token_ids, [1, 2, 3], 0), PushDone)
    assert decode.event()["type"] == "Received"
    assert not decode.read("entries", 20).any()
    assert not decode.read("entries", 21).any()
    assert_pushed(prefill, decode, [(3, 22)], slots=(0, 0))


def test_a_one_token_prompt_ships_only_its_completion(prefill: PrefillRank, decode: ChildRank) -> None:
    ticket = decode.issue("r-one", [5], [], slot=3)
    done = prefill.push(ticket, [5], [], 0)
    assert isinstance(done, PushDone)
    assert done.num_bytes == 0
    assert decode.event()["type"] == "Received"
    assert not decode.read("window", 3).any()


def test_a_cancelled_push_tells_decode_and_starts_no_more_writes(prefill: PrefillRank, decode: ChildRank) -> None:
    token_ids = prompt(3 * BLOCK_SIZE)
    ticket = decode.issue("r-cancel", token_ids, [11, 12, 13], slot=0)
    key = prefill.agent.open_push(ticket, token_ids)
    prefill.agent.push_blocks(key, 0, [1])
    prefill.agent.cancel_push(key, "the client left")
    prefill.agent.push_blocks(key, 1, [2, 3])
    prefill.agent.finish_push(key, 0, 0)
    failed = prefill.event()
    assert isinstance(failed, PushFailed)
    assert failed.error == "the client left"
    event = decode.event()
    assert (event["type"], event["error"]) == ("ReceiveFailed", "the client left")
    assert not decode.read("entries", 11).any()
    assert prefill.event(seconds=0.05) is None  # one event a push
    assert decode.event(seconds=0.05) is None


def test_blocks_of_an_aborted_request_are_not_reused_while_prefill_may_write(
    prefill: PrefillRank, decode: ChildRank
) -> None:
    pool = BlockPool(num_blocks=4, num_slots=1, block_size=BLOCK_SIZE, needs_snapshots=False)
    blocks, slot = pool.allocate_blocks(3), pool.allocate_slot()
    token_ids = prompt(3 * BLOCK_SIZE)
    ticket = decode.issue("r-gone", token_ids, blocks, slot)
    key = prefill.agent.open_push(ticket, token_ids)
    prefill.agent.push_blocks(key, 0, [4, 5])
    wait_until_held(prefill)

    decode.ask("abandon", generation=ticket.generation)  # the client has left, prefill does not know
    pool.quarantine(ticket.generation, blocks, slot)
    assert decode.event(seconds=0.1) is None
    assert not pool.can_allocate(2)
    prefill.agent.push_blocks(key, 2, [6])
    prefill.agent.finish_push(key, 1, 0)

    assert pool.end_quarantine(decode.event()["generation"])
    assert pool.can_allocate(4, num_slots=1)
    assert isinstance(prefill.event(), PushDone)
    assert_pushed(prefill, decode, list(zip([4, 5, 6], blocks, strict=True)), slots=(1, slot))


@pytest.mark.slow
def test_a_prompt_may_take_many_leases(prefill: PrefillRank, start_decode: Callable[..., ChildRank]) -> None:
    decode = start_decode("decode-patient", lease_seconds=1.5)
    token_ids = prompt(2 * BLOCK_SIZE)
    ticket = decode.issue("r-long", token_ids, [0, 1], slot=0)
    key = prefill.agent.open_push(ticket, token_ids)
    time.sleep(2.0)  # in the queue
    prefill.agent.push_blocks(key, 0, [1])
    time.sleep(2.0)  # computing
    prefill.agent.push_blocks(key, 1, [2])
    prefill.agent.finish_push(key, 0, 0)
    assert isinstance(prefill.event(), PushDone)
    assert decode.event()["type"] == "Received"
    assert_pushed(prefill, decode, [(1, 0), (2, 1)], slots=(0, 0))


@pytest.mark.slow
def test_a_frozen_prefill_rank_costs_the_request_one_lease_and_writes_nothing_when_it_thaws(
    start_decode: Callable[..., ChildRank],
) -> None:
    cache = rank_process.Cache(fill=0)
    decode = make_agent(cache, "decode-here", uuid.uuid4().hex, 1.5, write_timeout_seconds=0.2)
    try:
        frozen = start_decode("prefill-frozen")
        token_ids = prompt(2 * BLOCK_SIZE)
        ticket = decode.issue_ticket("r-frozen", token_ids, 0, [0, 1], 0)
        key = frozen.ask("open", ticket=ticket_to_json(ticket).decode(), token_ids=token_ids)
        time.sleep(2.5)
        assert decode.poll_events() == [], "the lease is kept while it lives"
        frozen.freeze()
        stopped_at = time.monotonic()
        lost = wait_for_event(decode)
        assert isinstance(lost, ReceiveLost)
        assert "not renewed" in lost.error
        assert time.monotonic() - stopped_at < 3.0
        frozen.thaw()
        frozen.ask("push", key=key, first=0, blocks=[1, 2])
        frozen.ask("finish", key=key, slot=0)
        assert frozen.event()["type"] == "PushFailed"
        failed = wait_for_event(decode)  # it says so itself: the blocks need not wait for bytes to land
        assert isinstance(failed, ReceiveFailed)
        assert time.monotonic() - stopped_at < 5.2  # the slack alone is 5 s
        assert not cache.arrays["entries"].any()
    finally:
        decode.close()


def test_a_dead_prefill_rank_costs_the_request_one_lease(start_decode: Callable[..., ChildRank]) -> None:
    decode = make_agent(rank_process.Cache(fill=0), "decode-here", uuid.uuid4().hex, 1.0)
    try:
        doomed = start_decode("prefill-doomed")
        ticket = decode.issue_ticket("r-dead", prompt(BLOCK_SIZE), 0, [0], 0)
        doomed.ask("open", ticket=ticket_to_json(ticket).decode(), token_ids=prompt(BLOCK_SIZE))
        wait_until_held(doomed)
        doomed.process.kill()
        doomed.process.wait()
        killed_at = time.monotonic()
        assert isinstance(wait_for_event(decode), ReceiveLost)
        assert time.monotonic() - killed_at < 3.0
    finally:
        decode.close()


def test_decode_takes_a_ticket_back_from_a_prefill_rank_that_does_not_know(
    prefill: PrefillRank, start_decode: Callable[..., ChildRank]
) -> None:
    decode = start_decode("decode-leaving", lease_seconds=6.0)
    token_ids = prompt(2 * BLOCK_SIZE)
    ticket = decode.issue("r-left", token_ids, [0, 1], slot=0)
    prefill.agent.open_push(ticket, token_ids)
    wait_until_held(prefill)
    decode.ask("abandon", generation=ticket.generation)
    failed = prefill.event()  # at its next heartbeat, without a word over HTTP
    assert isinstance(failed, PushFailed)
    assert "wants this ticket's KV no more" in failed.error
    assert decode.event()["type"] == "ReceiveFailed"


def test_a_replayed_ticket_writes_nothing_and_does_not_disturb_the_first_rank(
    prefill: PrefillRank, decode: ChildRank
) -> None:
    other = PrefillRank(name="prefill-other")
    try:
        token_ids = prompt(2 * BLOCK_SIZE)
        ticket = decode.issue("r-twice", token_ids, [50, 51], slot=4)
        key = prefill.agent.open_push(ticket, token_ids)
        prefill.agent.push_blocks(key, 0, [1])
        wait_until_held(prefill)
        replayed = other.push(ticket, token_ids, [5, 6], 1)
        assert isinstance(replayed, PushFailed)
        assert "another prefill rank" in replayed.error
        prefill.agent.push_blocks(key, 1, [2])
        prefill.agent.finish_push(key, 0, 0)
        assert isinstance(prefill.event(), PushDone)
        assert decode.event()["type"] == "Received"
        assert_pushed(prefill, decode, [(1, 50), (2, 51)], slots=(0, 4))
    finally:
        other.agent.close()


def test_a_ticket_is_good_for_one_push(prefill: PrefillRank, decode: ChildRank) -> None:
    token_ids = prompt(2 * BLOCK_SIZE)
    ticket = decode.issue("r-replay", token_ids, [0, 1], slot=0)
    assert isinstance(prefill.push(ticket, token_ids, [1, 2], 0), PushDone)
    with pytest.raises(TicketError, match="used before") as refused:
        prefill.agent.open_push(ticket, token_ids)
    assert (refused.value.error.status, refused.value.error.code) == (409, "stale_ticket")


def test_a_killed_peer_fails_the_push_at_once_and_its_next_life_works(
    prefill: PrefillRank, start_decode: Callable[..., ChildRank]
) -> None:
    token_ids = prompt(2 * BLOCK_SIZE)
    first = start_decode("decode-restarted")
    assert isinstance(prefill.push(first.issue("r-a", token_ids, [0, 1], 0), token_ids, [1, 2], 0), PushDone)
    ticket = first.issue("r-b", token_ids, [0, 1], 0)
    first.process.kill()
    first.process.wait()
    failed = prefill.push(ticket, token_ids, [1, 2], 0)
    assert isinstance(failed, PushFailed)
    assert "took longer" not in failed.error  # the broken connection was noticed, no timeout was waited for

    second = start_decode("decode-restarted")
    assert isinstance(prefill.push(second.issue("r-c", token_ids, [0, 1], 0), token_ids, [3, 4], 1), PushDone)
    assert second.event()["type"] == "Received"
    assert_pushed(prefill, second, [(3, 0), (4, 1)], slots=(1, 0))


@pytest.mark.slow
def test_a_peer_that_restarts_between_two_pushes_is_replaced(
    prefill: PrefillRank, start_decode: Callable[..., ChildRank]
) -> None:
    token_ids = prompt(2 * BLOCK_SIZE)
    for _life in range(2):
        decode = start_decode("decode-two-lives")
        assert isinstance(prefill.push(decode.issue("r", token_ids, [0, 1], 0), token_ids, [1, 2], 0), PushDone)
        num_peers = prefill.agent.stats().num_peers
        decode.process.kill()
        decode.process.wait()
    other = start_decode("decode-two-lives")
    assert isinstance(prefill.push(other.issue("r", token_ids, [0, 1], 0), token_ids, [1, 2], 0), PushDone)
    assert prefill.agent.stats().num_peers == num_peers  # no connection to a former life is kept


@pytest.mark.slow
def test_a_frozen_peer_costs_one_write_timeout_and_the_others_go_on(
    start_decode: Callable[..., ChildRank],
) -> None:
    prefill = PrefillRank(write_timeout_seconds=1.5)
    token_ids = prompt(2 * BLOCK_SIZE)
    frozen, alive = start_decode("decode-frozen"), start_decode("decode-alive")
    assert isinstance(prefill.push(frozen.issue("r-1", token_ids, [0, 1], 0), token_ids, [1, 2], 0), PushDone)
    ticket = frozen.issue("r-2", token_ids, [0, 1], 0)
    key = prefill.agent.open_push(ticket, token_ids)
    wait_until_held(prefill)
    frozen.freeze()
    prefill.agent.push_blocks(key, 0, [1, 2])
    prefill.agent.finish_push(key, 0, 0)
    done = prefill.push(alive.issue("r-3", token_ids, [0, 1], 0), token_ids, [1, 2], 0)
    assert isinstance(done, PushDone)
    assert done.request_id == "r-3"
    failed = prefill.event()
    assert isinstance(failed, PushFailed)
    assert failed.request_id == "r-2"
    frozen.thaw()
    assert isinstance(prefill.push(frozen.issue("r-4", token_ids, [5, 6], 1), token_ids, [1, 2], 0), PushDone)
    assert_pushed(prefill, frozen, [(1, 5), (2, 6)], slots=(0, 1))
    assert prefill.agent.stats().num_push_failures_total == 1
    prefill.agent.close()


def test_damaged_metadata_fails_the_push_and_spoils_nothing(prefill: PrefillRank, decode: ChildRank) -> None:
    token_ids = prompt(2 * BLOCK_SIZE)
    ticket = decode.issue("r-bad", token_ids, [0, 1], 0)
    metadata = bytearray(ticket.peer.agent_metadata)
    metadata[200] ^= 0xFF
    bad = msgspec.structs.replace(
        ticket, peer=msgspec.structs.replace(ticket.peer, agent_metadata=bytes(metadata)), request_id="r-bad"
    )
    failed = prefill.push(bad, token_ids, [1, 2], 0)
    assert isinstance(failed, PushFailed)
    assert "damaged" in failed.error
    good = decode.issue("r-good", token_ids, [0, 1], 0)
    assert isinstance(prefill.push(good, token_ids, [1, 2], 0), PushDone)


def test_closing_tells_decode_about_open_pushes(start_decode: Callable[..., ChildRank]) -> None:
    decode, leaving = start_decode(), PrefillRank()
    token_ids = prompt(2 * BLOCK_SIZE)
    ticket = decode.issue("r-drain", token_ids, [0, 1], 0)
    leaving.agent.open_push(ticket, token_ids)
    leaving.agent.close()
    event = decode.event()
    assert (event["type"], event["error"]) == ("ReceiveFailed", "the prefill engine is shutting down")
