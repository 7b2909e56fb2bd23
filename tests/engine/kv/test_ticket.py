"""Tickets: what decode issues, what prefill refuses and how it says so."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.kv.tickets import PEER, REGIONS, make_ticket, token_ids_of

from headrace_engine.core import Region, Ticket
from headrace_engine.kv.ticket import (
    TicketError,
    TicketIssuer,
    check_ticket,
    num_pushed_blocks,
    ticket_from_json,
    ticket_to_json,
)


def check(ticket: Ticket, token_ids: list[int] | None = None) -> None:
    check_ticket(
        ticket,
        token_ids=token_ids_of(10) if token_ids is None else token_ids,
        fingerprint="fp",
        block_size=4,
        regions=REGIONS,
    )


def with_peer(**changes: Any) -> Ticket:
    return make_ticket(peer=msgspec.structs.replace(PEER, **changes))


def with_region(index: int, **changes: Any) -> Ticket:
    regions = list(PEER.regions)
    regions[index] = msgspec.structs.replace(regions[index], **changes)
    return with_peer(regions=tuple(regions))


def test_an_issued_ticket_is_accepted() -> None:
    issuer = TicketIssuer("inc-1", "fp", PEER, block_size=4, lease_seconds=30.0)
    ticket = issuer.issue("r-1", token_ids_of(10), 4, [7, 8, 9, 10], 2)
    assert ticket.block_ids == (7, 8, 9)  # 9 tokens are shipped
    check(ticket)
    assert issuer.issue("r-2", [1], 0, [], 0).generation == 2


@pytest.mark.parametrize(("held", "blocks"), [(3, 3), (12, 3), (0, 2)])
def test_a_ticket_that_would_be_refused_is_not_issued(held: int, blocks: int) -> None:
    with pytest.raises(ValueError, match=r"held tokens|need 3 blocks"):
        TicketIssuer("inc-1", "fp", PEER, 4, 30.0).issue("r", token_ids_of(10), held, list(range(blocks)), 0)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_the_last_prompt_token_is_not_shipped(num_tokens: int, num_blocks: int) -> None:
    assert num_pushed_blocks(num_tokens, block_size=4) == num_blocks


REFUSED = {
    "another fingerprint": (make_ticket(fingerprint="other"), 409, "fingerprint_mismatch"),
    "fewer tokens": (make_ticket(9), 409, "prompt_mismatch"),
    "other tokens": (make_ticket(token_hash="0" * 32), 409, "prompt_mismatch"),
    "no incarnation": (make_ticket(incarnation=""), 400, "invalid_ticket"),
    "a foreign agent": (with_peer(agent_name="decode-0/inc-2"), 400, "invalid_ticket"),
    "part of an incarnation": (make_ticket(incarnation="c-1"), 400, "invalid_ticket"),
    "an endless name": (with_peer(agent_name="inc-1" * 1000), 400, "invalid_ticket"),
    "no metadata": (with_peer(agent_metadata=b""), 400, "invalid_ticket"),
    "huge metadata": (with_peer(agent_metadata=bytes(1 << 20)), 400, "invalid_ticket"),
    "generation 0": (make_ticket(generation=0), 400, "invalid_ticket"),
    "no lease": (make_ticket(lease_seconds=0.0), 400, "invalid_ticket"),
    "an endless lease": (make_ticket(lease_seconds=float("inf")), 400, "invalid_ticket"),
    "a lease that is no number": (make_ticket(lease_seconds=float("nan")), 400, "invalid_ticket"),
    "a region less": (with_peer(regions=PEER.regions[:2]), 400, "invalid_ticket"),
    "another region": (with_region(0, name="other"), 400, "invalid_ticket"),
    "another item size": (with_region(1, item_bytes=513), 400, "invalid_ticket"),
    "no items": (with_region(2, num_items=0), 400, "invalid_ticket"),
    "endless items": (with_region(2, num_items=1 << 40), 400, "invalid_ticket"),
    "address 0": (with_region(0, base_address=0), 400, "invalid_ticket"),
    "an address beyond memory": (with_region(0, base_address=(1 << 64) - 1), 400, "invalid_ticket"),
    "a block too few": (make_ticket(block_ids=(1, 2)), 400, "invalid_ticket"),
    "a block too many": (make_ticket(block_ids=(1, 2, 3, 4)), 400, "invalid_ticket"),
    "a block twice": (make_ticket(block_ids=(1, 2, 1)), 400, "invalid_ticket"),
    "a block out of range": (make_ticket(block_ids=(1, 2, 64)), 400, "invalid_ticket"),
    "a negative block": (make_ticket(block_ids=(1, 2, -1)), 400, "invalid_ticket"),
    "a slot out of range": (make_ticket(state_slot=8), 400, "invalid_ticket"),
    "held tokens in the middle of a block": (make_ticket(num_held_tokens=3), 400, "invalid_ticket"),
    "more held than shipped": (make_ticket(num_held_tokens=12), 400, "invalid_ticket"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_prefill_refuses(what: str) -> None:
    ticket, status, code = REFUSED[what]
    with pytest.raises(TicketError) as refused:
        check(ticket)
    assert (refused.value.error.status, refused.value.error.code) == (status, code)
    assert len(str(refused.value)) < 500  # whatever the ticket holds, the answer stays readable


def test_a_ticket_survives_json() -> None:
    ticket = make_ticket(peer=msgspec.structs.replace(PEER, agent_metadata=bytes(range(256))))
    data = ticket_to_json(ticket)
    assert ticket_from_json(data) == ticket_from_json(data.decode()) == ticket_from_json(msgspec.Raw(data)) == ticket
    assert b"\n" not in data  # one line of an event stream


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"generation": "one"}, "generation"),
        ({"block_ids": [1.5]}, "block_ids"),
        ({"block_ids": None}, "block_ids"),
        ({"peer": []}, "peer"),
        ({"lease_seconds": "long"}, "lease_seconds"),
    ],
)
def test_a_malformed_ticket_is_refused_with_the_field_named(change: dict[str, Any], names: str) -> None:
    record = json.loads(ticket_to_json(make_ticket()))
    with pytest.raises(TicketError, match=names) as refused:
        ticket_from_json(json.dumps({**record, **change}))
    assert (refused.value.error.status, refused.value.error.code) == (400, "invalid_ticket")


@given(st.one_of(st.binary(max_size=200), st.text(max_size=100)))
def test_no_bytes_crash_the_reader(data: bytes | str) -> None:
    with pytest.raises(TicketError):
        ticket_from_json(data)


@given(data=st.data())
def test_a_garbled_ticket_is_refused_or_valid_but_never_crashes(data: st.DataObject) -> None:
    record = json.loads(ticket_to_json(make_ticket()))
    junk = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=4))
    fields = data.draw(st.lists(st.sampled_from(sorted(record)), min_size=1, max_size=3))
    for field in fields:
        record[field] = data.draw(junk)
    for field in data.draw(st.lists(st.sampled_from(list(Region.__struct_fields__)), max_size=2)):
        if isinstance(record["peer"], dict):
            record["peer"]["regions"][0][field] = data.draw(junk)
    with contextlib.suppress(TicketError):
        check(ticket_from_json(json.dumps(record)))
