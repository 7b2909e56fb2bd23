"""Pusher over a transport whose writes end when the test says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from tests.engine.kv.tickets import PEER, make_ticket

from headrace_engine.core import Peer, Ticket
from headrace_engine.kv.events import PushDone, PushFailed
from headrace_engine.kv.nixl import TransportError, WriteHandle, WriteState
from headrace_engine.kv.pusher import MAX_PEERS, Pusher
from headrace_engine.kv.ticket import Completion, Done, Failed, decode_completion

BLOCK = 4


@dataclass
class ScriptedTransport:
    """Connects at once; writes run until `handles[i].state` is set; can be told to refuse."""

    peers: list[str] = field(default_factory=list)
    handles: list[WriteHandle] = field(default_factory=list)
    peer_of: list[str] = field(default_factory=list)  # of each handle
    told: list[tuple[str, Completion | None]] = field(default_factory=list)
    refusing: set[str] = field(default_factory=set)  # "connect" | "write" | "notify"

    def connect(self, peer: Peer) -> None:
        self._may("connect")
        self.peers.append(peer.agent_name)

    def disconnect(self, peer_name: str) -> None:
        self.peers.remove(peer_name)

    def write(
        self,
        peer_name: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        slots: tuple[int, int] | None,
        notification: bytes,
    ) -> WriteHandle:
        self._may("write")
        assert peer_name in self.peers
        self.handles.append(WriteHandle(WriteState.RUNNING, None))
        self.peer_of.append(peer_name)
        return self.handles[-1]

    def poll(self, handle: WriteHandle) -> WriteState:
        return handle.state

    def give_up(self, handle: WriteHandle) -> None:
        name = self.peer_of[next(index for index, own in enumerate(self.handles) if own is handle)]
        assert name not in self.peers, "a running write is given up only with its connection"
        handle.state = WriteState.FAILED

    def notify(self, peer_name: str, message: bytes) -> None:
        self._may("notify")
        if peer_name not in self.peers:
            raise TransportError("not connected")
        self.told.append((peer_name, decode_completion(message)))

    def _may(self, what: str) -> None:
        if what in self.refusing:
            raise TransportError(f"cannot {what}")


class Rank:
    """A pusher and its transport; blocks are 100 bytes, slots 10, one block a write."""

    def __init__(self) -> None:
        self.transport = ScriptedTransport()
        self.pusher = Pusher(self.transport, BLOCK, 100, 10, max_write_bytes=100, write_timeout_seconds=10.0)
        self.now = 0.0

    def open(self, ticket: Ticket) -> tuple[str, int]:
        self.pusher.open(ticket, self.now)
        return (ticket.incarnation, ticket.generation)

    def give_all(self, ticket: Ticket) -> tuple[str, int]:
        key = self.open(ticket)
        self.pusher.blocks_complete(key, 0, list(range(len(ticket.block_ids))))
        self.pusher.finish(key, 0, 0)
        return key

    def settle(self) -> list[PushDone | PushFailed]:
        """Steps until there is nothing more to do at this time."""
        events = self.pusher.step(self.now)
        while self.pusher.has_more:
            events += self.pusher.step(self.now)
        return events

    def end(self, index: int, state: WriteState = WriteState.DONE) -> None:
        self.transport.handles[index].state = state


def peer_named(rank_name: str, incarnation: str) -> Peer:
    return msgspec.structs.replace(PEER, agent_name=f"{rank_name}/{incarnation}")


def ticket_to(peer: Peer, generation: int = 1, num_tokens: int = 5, request_id: str = "r-1") -> Ticket:
    incarnation = peer.agent_name.rpartition("/")[2]
    return make_ticket(
        num_tokens, BLOCK, peer=peer, incarnation=incarnation, generation=generation, request_id=request_id
    )


def test_a_push_that_ends_well_is_reported_once_with_its_bytes_and_time() -> None:
    rank = Rank()
    key = rank.give_all(ticket_to(PEER))
    assert rank.settle() == []
    rank.now = 2.0
    rank.end(0)
    assert rank.settle() == [PushDone(key, "r-1", 110, 2.0)]
    assert rank.settle() == []
    assert rank.pusher.is_idle


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_one_failed_write_of_several_tells_decode_only_when_none_can_write_any_more(order: tuple[int, ...]) -> None:
    rank = Rank()
    key = rank.open(ticket_to(PEER, num_tokens=13))
    rank.pusher.blocks_complete(key, 0, [0, 1, 2])
    rank.settle()
    assert len(rank.transport.handles) == 3
    events: list[PushDone | PushFailed] = []
    for position, index in enumerate(order):
        rank.end(index, WriteState.FAILED if position == 1 else WriteState.DONE)
        events += rank.settle()
        # The second to end failed: its connection was ended at once, and the third with it.
        assert len(rank.transport.told) == (0 if position == 0 else 1)
    assert events == [PushFailed(key, "r-1", "a write failed")]


def test_a_post_that_fails_is_told_to_decode_at_once() -> None:
    rank = Rank()
    rank.transport.refusing = {"write"}
    key = rank.give_all(ticket_to(PEER))
    assert rank.settle() == [PushFailed(key, "r-1", "cannot write")]
    assert rank.transport.told == [(PEER.agent_name, Failed("r-1", 1, "cannot write"))]


def test_a_cancelled_push_is_told_to_decode() -> None:
    rank = Rank()
    key = rank.open(ticket_to(PEER))
    rank.pusher.cancel(key, "the client left")
    assert rank.settle() == [PushFailed(key, "r-1", "the client left")]
    assert rank.transport.told == [(PEER.agent_name, Failed("r-1", 1, "the client left"))]
    rank.pusher.cancel(key, "again")
    rank.pusher.finish(key, 0, 0)
    assert rank.settle() == []


def test_a_peer_that_cannot_be_reached_fails_the_push() -> None:
    rank = Rank()
    rank.transport.refusing = {"connect"}
    key = rank.open(ticket_to(PEER))
    assert rank.settle() == [PushFailed(key, "r-1", "cannot connect")]
    assert rank.pusher.is_idle


def test_pushes_to_ranks_with_equal_generations_and_request_ids_do_not_mix() -> None:
    rank = Rank()
    peers = [peer_named(f"decode-{index}", f"inc-{index}") for index in range(4)]
    keys = [rank.give_all(ticket_to(peer)) for peer in peers]
    rank.settle()
    assert len(set(keys)) == 4
    for index in (2, 0, 3, 1):
        rank.end(rank.transport.peer_of.index(peers[index].agent_name))
        assert [event.key for event in rank.settle()] == [keys[index]]


def test_a_write_that_takes_too_long_ends_the_connection_and_every_push_over_it() -> None:
    rank = Rank()
    other = peer_named("decode-1", "inc-9")
    slow = [rank.give_all(ticket_to(PEER, generation)) for generation in (1, 2)]
    rank.settle()
    rank.now = 5.0
    rank.give_all(ticket_to(other))
    rank.settle()
    rank.now = 10.1
    assert [event.key for event in rank.settle()] == slow
    assert {name for name, _ in rank.transport.told} == {PEER.agent_name}
    assert rank.transport.handles[2].state is WriteState.RUNNING


def test_a_new_life_of_a_rank_replaces_the_old_connection() -> None:
    rank = Rank()
    for incarnation in ("inc-1", "inc-2", "inc-3"):
        rank.give_all(ticket_to(peer_named("decode-0", incarnation)))
        rank.settle()
        rank.end(-1)
        rank.settle()
    assert rank.transport.peers == ["decode-0/inc-3"]


def test_a_peer_with_the_name_of_a_connected_one_but_other_regions_does_not_disturb_it() -> None:
    rank = Rank()
    key = rank.give_all(ticket_to(PEER))
    rank.settle()
    forged = msgspec.structs.replace(PEER, regions=PEER.regions[:1])
    rank.open(ticket_to(forged, generation=2))
    (failed,) = rank.settle()
    assert isinstance(failed, PushFailed)
    assert "in use with other regions" in failed.error
    rank.end(0)
    assert [event.key for event in rank.settle()] == [key]


def test_connections_are_bounded() -> None:
    rank = Rank()
    for index in range(MAX_PEERS + 10):
        rank.give_all(ticket_to(peer_named(f"decode-{index}", "inc")))
        rank.settle()
        rank.end(-1)
        rank.settle()
    assert len(rank.transport.peers) == MAX_PEERS
    assert "decode-0/inc" not in rank.transport.peers


def test_a_long_push_starts_one_write_a_step_so_that_others_get_their_turn() -> None:
    rank = Rank()
    rank.give_all(ticket_to(PEER, num_tokens=13))
    rank.give_all(ticket_to(peer_named("decode-1", "inc-9")))
    rank.pusher.step(rank.now)
    assert sorted(rank.transport.peer_of) == [PEER.agent_name, "decode-1/inc-9"]


def test_done_rides_behind_the_last_write_and_is_not_sent_twice() -> None:
    rank = Rank()
    rank.give_all(ticket_to(PEER))
    rank.settle()
    rank.end(0)
    rank.settle()
    assert not [completion for _, completion in rank.transport.told if isinstance(completion, Done)]
