"""Tickets: how decode hands them out, how prefill checks them. Pure.

A ticket arrives over HTTP and leads to writes into another process's memory, so nothing in it is trusted: everything
is checked against this rank's own configuration and the request's own tokens before a push begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace_engine.core import Peer, Region, RequestError, Ticket, hash_tokens
from headrace_engine.models.protocol import GroupKind

MAX_TICKET_BYTES = 8 << 20  # a million blocks' ids; metadata is under a kilobyte
MAX_METADATA_BYTES = 64 << 10
MAX_NAME_LENGTH = 256
MAX_ITEMS = 1 << 20
MAX_LEASE_SECONDS = 3600.0
_ADDRESS_END = 1 << 64


class TicketError(ValueError):
    """A ticket that cannot be honoured; `error` is what the HTTP leg answers."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RequestError(status=status, message=message, code=code, param="headrace_ticket")


@dataclass(frozen=True)
class CacheRegion:
    """A region, and whether its items are blocks (PAGED) or sequence slots (STATE)."""

    region: Region
    kind: GroupKind


# --- what travels with a ticket over HTTP ----------------------------------------------------------------------------


def ticket_to_json(ticket: Ticket) -> bytes:
    """One line of JSON; bytes fields in base64."""
    return msgspec.json.encode(ticket)


def ticket_from_json(data: bytes | str | msgspec.Raw) -> Ticket:
    """The ticket in a request body. Raises TicketError (400) that names the malformed field."""
    if len(memoryview(data) if not isinstance(data, str) else data) > MAX_TICKET_BYTES:
        raise TicketError(400, "invalid_ticket", f"the ticket is larger than {MAX_TICKET_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=Ticket)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TicketError(400, "invalid_ticket", f"the ticket is malformed: {error}") from error


# --- decode's side: issuing ------------------------------------------------------------------------------------------


class TicketIssuer:
    """Numbers tickets: a generation is never used twice within an incarnation."""

    def __init__(self, incarnation: str, fingerprint: str, peer: Peer, block_size: int, lease_seconds: float) -> None:
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._peer = peer
        self._block_size = block_size
        self._lease_seconds = lease_seconds
        self._last_generation = 0

    def issue(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_held_tokens: int,
        block_ids: Sequence[int],
        state_slot: int,
    ) -> Ticket:
        """A ticket for a prompt whose blocks (from token 0, held ones first) and slot are reserved."""
        if num_held_tokens % self._block_size or num_held_tokens > len(token_ids) - 1:
            raise ValueError(f"{num_held_tokens} held tokens of {len(token_ids)}, blocks of {self._block_size}")
        num_blocks = num_pushed_blocks(len(token_ids), self._block_size)
        if len(block_ids) < num_blocks:
            raise ValueError(f"{len(token_ids)} tokens need {num_blocks} blocks, only {len(block_ids)} reserved")
        self._last_generation += 1
        return Ticket(
            incarnation=self._incarnation,
            request_id=request_id,
            generation=self._last_generation,
            fingerprint=self._fingerprint,
            num_tokens=len(token_ids),
            token_hash=hash_tokens(token_ids),
            num_held_tokens=num_held_tokens,
            block_ids=tuple(block_ids[:num_blocks]),
            state_slot=state_slot,
            lease_seconds=self._lease_seconds,
            peer=self._peer,
        )


def num_pushed_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold a prompt's state as prefill ships it: without its last token."""
    return -(-(num_tokens - 1) // block_size)


# --- prefill's side: checking ----------------------------------------------------------------------------------------


def check_ticket(
    ticket: Ticket,
    *,
    token_ids: Sequence[int],
    fingerprint: str,
    block_size: int,
    regions: Sequence[CacheRegion],
) -> None:
    """Raise TicketError unless this rank can honour the ticket for these tokens. `regions` are this rank's own.

    409 `fingerprint_mismatch`, `prompt_mismatch`: right for another group or another prompt. 400 `invalid_ticket`:
    it contradicts itself.
    """
    if ticket.fingerprint != fingerprint:
        raise TicketError(
            409,
            "fingerprint_mismatch",
            f"the caches differ: decode has KV fingerprint {ticket.fingerprint[:80]!r}, prefill {fingerprint!r}; "
            "both roles must have the same model, block size and cache dtype",
        )
    if ticket.num_tokens != len(token_ids) or ticket.token_hash != hash_tokens(token_ids):
        raise TicketError(
            409,
            "prompt_mismatch",
            f"decode sees {ticket.num_tokens} prompt tokens, prefill {len(token_ids)}, or other token ids; "
            "both must have the same tokenizer and chat template",
        )
    _check_identity(ticket)
    _check_regions(ticket.peer.regions, regions)
    _check_destinations(ticket, block_size, regions)


def _invalid(message: str) -> TicketError:
    return TicketError(400, "invalid_ticket", message)


def _check_identity(ticket: Ticket) -> None:
    if not ticket.incarnation or len(ticket.peer.agent_name) > MAX_NAME_LENGTH:
        raise _invalid("the ticket's incarnation is empty or its agent name too long")
    if ticket.peer.agent_name.rpartition("/")[2] != ticket.incarnation:
        raise _invalid("the ticket's agent name does not end in its incarnation")
    if not 0 < len(ticket.peer.agent_metadata) <= MAX_METADATA_BYTES:
        raise _invalid(f"agent metadata has {len(ticket.peer.agent_metadata)} bytes")
    if ticket.generation < 1:
        raise _invalid(f"generation {ticket.generation} is not positive")
    if not (math.isfinite(ticket.lease_seconds) and 0 < ticket.lease_seconds <= MAX_LEASE_SECONDS):
        raise _invalid(f"lease_seconds is {ticket.lease_seconds}, not in 0..{MAX_LEASE_SECONDS:.0f}")


def _check_regions(theirs: Sequence[Region], ours: Sequence[CacheRegion]) -> None:
    if [region.name for region in theirs] != [own.region.name for own in ours]:
        raise _invalid(
            f"cache groups differ: ticket {[r.name for r in theirs]!r:.200}, here {[o.region.name for o in ours]}"
        )
    for region, own in zip(theirs, ours, strict=True):
        if region.item_bytes != own.region.item_bytes:
            raise _invalid(f"{region.name}: an item has {region.item_bytes} bytes, here {own.region.item_bytes}")
        if not 0 < region.num_items <= MAX_ITEMS:
            raise _invalid(f"{region.name}: {region.num_items} items")
        if region.base_address <= 0 or region.base_address + region.num_items * region.item_bytes > _ADDRESS_END:
            raise _invalid(f"{region.name}: the address range at {region.base_address} is none")


def _check_destinations(ticket: Ticket, block_size: int, ours: Sequence[CacheRegion]) -> None:
    num_blocks = num_pushed_blocks(ticket.num_tokens, block_size)
    if len(ticket.block_ids) != num_blocks:
        raise _invalid(f"{ticket.num_tokens} tokens are pushed into {num_blocks} blocks, not {len(ticket.block_ids)}")
    if ticket.num_held_tokens % block_size or not 0 <= ticket.num_held_tokens <= ticket.num_tokens - 1:
        raise _invalid(
            f"{ticket.num_held_tokens} held tokens are no whole blocks of the {ticket.num_tokens}-token prompt"
        )
    if len(set(ticket.block_ids)) != len(ticket.block_ids):
        raise _invalid("a block id occurs twice")
    sizes = {
        kind: min(
            (theirs.num_items for theirs, own in zip(ticket.peer.regions, ours, strict=True) if own.kind is kind),
            default=MAX_ITEMS,
        )
        for kind in GroupKind
    }
    for block in (min(ticket.block_ids, default=0), max(ticket.block_ids, default=0)):
        if not 0 <= block < sizes[GroupKind.PAGED]:
            raise _invalid(f"block id {block} is not in 0..{sizes[GroupKind.PAGED] - 1}")
    if not 0 <= ticket.state_slot < sizes[GroupKind.STATE]:
        raise _invalid(f"state slot {ticket.state_slot} is not in 0..{sizes[GroupKind.STATE] - 1}")
