"""Pusher over a transport whose writes end when the test says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from tests.engine.kv.tickets import PEER, make_ticket

from headrace_engine.core import Peer, Ticket
from headrace_engine.kv.connections import MAX_PEERS, Connections
from headrace_engine.kv.events import PushDone, PushFailed
from headrace_engine.kv.nixl import TransportError, WriteHandle, WriteState
from headrace_engine.kv.notices import Done, Failed, Notice, Renew, Renewed, decode_notice
from headrace_engine.kv.pusher import Pusher

BLOCK = 4


@dataclass
class ScriptedTransport:
    """Connects at once; writes run until `handles[i].state` is set; can be told to refuse."""

    peers: list[str] = field(default_factory=list)
    handles: list[WriteHandle] = field(default_factory=list)
    peer_of: list[str] = field(default_factory=list)  # of each handle
    told: list[tuple[str, Notice | None]] = field(default_factory=list)  # without requests for leases
    asked: list[tuple[str, Renew]] = field(default_factory=list)
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
        notice = decode_notice(message)
        if isinstance(notice, Renew):
            self.asked.append((peer_name, notice))
        else:
            self.told.append((peer_name, notice))

    def _may(self, what: str) -> None:
        if what in self.refusing:
            raise TransportError(f"cannot {what}")


class Rank:
    """A pusher and its transport; blocks are 100 bytes, slots 10, one block a write."""

    def __init__(self, grants: bool = True) -> None:
        self.transport = ScriptedTransport()
        self.now = 0.0
        self.grants = grants  # whether decode answers at once
        self.num_answered = 0
        self.pusher = Pusher(
            self.transport,
            Connections(self.transport),
            b"prefill's metadata",
            block_size=BLOCK,
            block_bytes=100,
            slot_bytes=10,
            max_write_bytes=100,
            write_timeout_seconds=10.0,
            clock=lambda: self.now,
        )

    def answer(self) -> None:
        """Grant what has been asked for and not been answered."""
        for peer_name, request in self.transport.asked[self.num_answered :]:
            self.pusher.renewed(peer_name, Renewed(request.sent_at, request.generations, ()))
        self.num_answered = len(self.transport.asked)

    def look(self) -> list[PushDone | PushFailed]:
        """What the agent does in one turn."""
        self.pusher.end_old_writes()
        if self.grants:
            self.answer()
        return self.pusher.step()

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
        events = self.look()
        while self.pusher.has_more or (self.grants and self.num_answered < len(self.transport.asked)):
            events += self.look()
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
    assert rank.transport.told == [(PEER.agent_name, Failed("r-1", 1, "cannot write", is_settled=False))]


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
    rank.look()  # asks for the leases
    rank.look()
    assert sorted(rank.transport.peer_of) == [PEER.agent_name, "decode-1/inc-9"]


def test_done_rides_behind_the_last_write_and_is_not_sent_twice() -> None:
    rank = Rank()
    rank.give_all(ticket_to(PEER))
    rank.settle()
    rank.end(0)
    rank.settle()
    assert not [completion for _, completion in rank.transport.told if isinstance(completion, Done)]


def test_a_lease_is_asked_for_at_once_and_kept_while_the_request_waits_and_computes() -> None:
    rank = Rank()
    key = rank.open(ticket_to(PEER))  # a lease of 30 s, the prompt takes ten minutes
    while rank.now < 600.0:
        assert rank.settle() == []
        rank.now += 1.0
    assert [request.sent_at for _, request in rank.transport.asked][:4] == [0.0, 5.0, 10.0, 15.0]
    rank.pusher.blocks_complete(key, 0, [0])
    rank.pusher.finish(key, 0, 0)
    assert rank.settle() == []
    rank.end(0)
    assert [type(event) for event in rank.settle()] == [PushDone]
    num_asked = len(rank.transport.asked)
    rank.now += 60.0
    rank.settle()
    assert len(rank.transport.asked) == num_asked, "nothing is open, nothing is asked"


def test_all_leases_of_a_peer_are_renewed_by_one_message() -> None:
    rank = Rank()
    other = peer_named("decode-1", "inc-9")
    for generation in range(1, 101):
        rank.open(ticket_to(PEER, generation))
    rank.open(ticket_to(other))
    rank.settle()
    rank.transport.asked.clear()
    rank.num_answered = 0
    rank.now = 5.0
    rank.settle()
    assert [(name, len(request.generations)) for name, request in rank.transport.asked] == [
        (PEER.agent_name, 100),
        (other.agent_name, 1),
    ]


def test_without_an_answer_nothing_is_written_and_the_push_ends_after_a_lease() -> None:
    rank = Rank(grants=False)
    key = rank.give_all(ticket_to(PEER))
    while rank.now < 29.0:
        assert rank.settle() == []
        rank.now += 1.0
    assert rank.transport.handles == []
    rank.now = 30.0
    assert rank.settle() == [PushFailed(key, "r-1", "decode has not granted the lease for 30 s")]
    assert not rank.pusher.awaits_lease


def test_a_lease_that_is_not_renewed_ends_the_push() -> None:
    rank = Rank()
    key = rank.open(ticket_to(PEER))
    rank.settle()
    rank.grants = False
    rank.now = 29.9
    assert rank.settle() == []
    rank.now = 30.0
    assert rank.settle() == [PushFailed(key, "r-1", "decode has not renewed the lease for 30 s")]


def test_a_refused_ticket_ends_the_push_at_once_and_decode_hears_of_it() -> None:
    rank = Rank()
    key = rank.open(ticket_to(PEER))
    rank.settle()
    rank.pusher.renewed(PEER.agent_name, Renewed(0.0, (), (1,)))
    (failed,) = rank.settle()
    assert isinstance(failed, PushFailed)
    assert (failed.key, "no more" in failed.error) == (key, True)
    assert [type(notice) for _, notice in rank.transport.told] == [Failed]


@pytest.mark.parametrize(
    ("sender", "answer"),
    [
        ("decode-9/inc-1", Renewed(0.0, (1,), ())),  # another rank that calls itself the same life
        (PEER.agent_name, Renewed(1.0, (1,), ())),  # of the future
        (PEER.agent_name, Renewed(float("nan"), (1,), ())),
        (PEER.agent_name, Renewed(0.0, (2,), ())),  # of another ticket
    ],
)
def test_an_answer_that_does_not_fit_grants_nothing(sender: str, answer: Renewed) -> None:
    rank = Rank(grants=False)
    rank.give_all(ticket_to(PEER))
    rank.settle()
    rank.pusher.renewed(sender, answer)
    rank.settle()
    assert rank.transport.handles == []


def test_a_decode_rank_that_has_died_fails_its_pushes_at_the_next_heartbeat() -> None:
    rank = Rank()
    key = rank.open(ticket_to(PEER))
    rank.settle()
    rank.transport.refusing = {"notify"}
    rank.now = 5.0
    assert rank.settle() == [PushFailed(key, "r-1", "the connection to decode broke: cannot notify")]


def test_a_write_that_was_too_slow_is_given_up_before_the_transport_moves_its_bytes() -> None:
    rank = Rank()
    rank.give_all(ticket_to(PEER))
    rank.settle()
    rank.now = 100.0  # this process was stopped
    polled: list[WriteHandle] = []
    poll = rank.transport.poll
    rank.transport.poll = lambda handle: (polled.append(handle), poll(handle))[1]  # type: ignore[method-assign]
    rank.look()
    assert polled == []
    assert rank.transport.handles[0].state is WriteState.FAILED


def test_pushes_that_wait_cost_a_step_nothing() -> None:
    rank = Rank()
    for generation in range(1, 513):
        rank.open(ticket_to(PEER, generation))
    rank.settle()
    looked_at: list[int] = []
    for transfer in rank.pusher._transfers.values():
        push = transfer.push
        push.next_action = lambda now, push=push: looked_at.append(push.ticket.generation)  # type: ignore[method-assign]
    rank.settle()
    assert looked_at == []
    rank.pusher.blocks_complete((PEER.agent_name.rpartition("/")[2], 7), 0, [0])
    rank.settle()
    assert looked_at == [7]
