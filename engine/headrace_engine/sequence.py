"""A request on its way through one rank, and what the scheduler asks the rank to do about it. Pure, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from headrace_engine.core import EngineRequest, FinishReason, Leg, RequestError, SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # holds no block
    RUNNING = "running"  # computes tokens
    WAITING_FOR_KV = "waiting_for_kv"  # DECODE leg: ticket is out, blocks and slot are a peer's to write
    PUSHING = "pushing"  # PREFILL leg: computed (or cancelled), blocks and slot are still being read
    ENDED = "ended"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One request's tokens and cache. `token_ids` is the prompt followed by what was generated."""

    request_id: str
    leg: Leg
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival_seconds: float
    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose state is in the cache
    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache, here or on the prefill engine
    block_ids: list[int] = field(default_factory=list)
    state_slot: int = -1
    generation: int = 0  # DECODE: of the ticket
    num_held_blocks: int = 0  # DECODE: leading blocks that prefill does not write
    num_pushed_blocks: int = 0  # PREFILL: leading blocks handed to the transfer
    was_admitted: bool = False
    is_cancelled: bool = False
    adjusts_logits: bool = field(init=False)  # as the sampling says, looked up once

    def __post_init__(self) -> None:
        self.adjusts_logits = self.sampling.adjusts_logits

    @classmethod
    def of(cls, request: EngineRequest, now: float) -> Sequence:
        prompt = list(request.prompt_token_ids)
        return cls(request.request_id, request.leg, prompt, len(prompt), request.sampling, now)

    @property
    def num_target(self) -> int:
        """How many tokens to compute with what is known now. Prefill leaves the last prompt token to decode."""
        return len(self.token_ids) - 1 if self.leg is Leg.PREFILL else len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def can_be_preempted(self) -> bool:
        """A prefill leg's blocks are being read by the transfer, and it never grows."""
        return self.status is Status.RUNNING and self.leg is not Leg.PREFILL


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: its next `num_tokens` tokens; `samples`: the last one yields a token."""

    sequence: Sequence
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What to run now. `slot_copies`: (from, to) state slots, to be copied in this order before the forward."""

    rows: list[Row]
    slot_copies: list[tuple[int, int]]


# --- what the rank must do or tell, in order -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IssueTicket:
    """DECODE: blocks and slot are reserved; issue the ticket, tell the scheduler its generation, and send it.

    `num_held_tokens` leading tokens are in the cache already.
    """

    sequence: Sequence
    num_held_tokens: int


@dataclass(frozen=True, slots=True)
class RevokeTicket:
    """DECODE: the request has ended early; its ticket's notification only ends a quarantine."""

    generation: int


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """PREFILL: blocks [first, first + len(block_ids)) of the sequence are final."""

    request_id: str
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushEnd:
    """PREFILL: all blocks were handed over; push the state slot and tell the peer."""

    request_id: str
    state_slot: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CancelPush:
    """PREFILL: start no more writes and tell the peer that none will come."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Generated:
    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    error: RequestError


Action = IssueTicket | RevokeTicket | PushBlocks | PushEnd | CancelPush | Generated | Refused
