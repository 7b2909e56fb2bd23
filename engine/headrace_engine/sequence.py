"""A request on its way through one rank, and what the scheduler asks the rank to do about it. Pure, no torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace_engine.core import EngineRequest, FinishReason, Leg, RequestError, SamplingParams, TokenScore

MAX_SCORED_PER_STEP = 128  # prompt tokens of one step that get a score: each has logits of the whole vocabulary


class Status(enum.Enum):
    WAITING = "waiting"  # holds no block
    RUNNING = "running"  # computes tokens
    WAITING_FOR_KV = "waiting_for_kv"  # DECODE leg: ticket is out, blocks and slot are a peer's to write
    PUSHING = "pushing"  # PREFILL leg: computed (or cancelled), blocks and slot are still being read
    ENDED = "ended"


class Guide(Protocol):
    """What keeps an answer to its grammar (sampling.grammar)."""

    def follow(self, token_ids: SequenceOf[int], num_prompt_tokens: int) -> bool: ...

    def allow(self, words: Any) -> bool: ...


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
    num_expected_cached: int = 0  # prompt tokens that were in the cache when it arrived: need no computing, it seems
    num_held_blocks: int = 0  # DECODE: leading blocks that prefill does not write
    num_pushed_blocks: int = 0  # PREFILL: leading blocks handed to the transfer
    leader: Sequence | None = None  # DECODE: whose KV is awaited for this one too
    followers: list[Sequence] = field(default_factory=list)  # those of which this is the leader
    was_admitted: bool = False
    is_cancelled: bool = False
    guide: Guide | None = None
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of tokens 1, 2, ... as far as computed
    adjusts_logits: bool = field(init=False)  # as the sampling says, looked up once

    def __post_init__(self) -> None:
        self.adjusts_logits = self.sampling.adjusts_logits

    @classmethod
    def of(cls, request: EngineRequest, now: float, guide: Guide | None = None) -> Sequence:
        prompt = list(request.prompt_token_ids)
        return cls(request.request_id, request.leg, prompt, len(prompt), request.sampling, now, guide=guide)

    @property
    def num_target(self) -> int:
        """How many tokens to compute with what is known now. Prefill leaves the last prompt token to decode."""
        return len(self.token_ids) - 1 if self.leg is Leg.PREFILL else len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens that are yet to be computed here, as far as is known before it is admitted."""
        if self.leg is Leg.DECODE and not self.was_admitted:
            return 0  # prefill computes them
        known = self.num_computed if self.status is Status.RUNNING else max(self.num_computed, self.num_expected_cached)
        return max(0, min(self.num_target, self.num_prompt_tokens) - known)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt still need a score: then they must be computed here, in small chunks."""
        wants = self.sampling.num_prompt_logprobs is not None
        return wants and len(self.prompt_scores) < self.num_prompt_tokens - 1

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

    @property
    def scored(self) -> range:
        """Positions in the sequence whose logits score the prompt token behind them."""
        sequence = self.sequence
        if not sequence.scores_prompt:
            return range(0)
        first = max(sequence.num_computed, len(sequence.prompt_scores))
        return range(first, min(sequence.num_computed + self.num_tokens, sequence.num_prompt_tokens - 1))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step has made.

    token_ids: of the rows that sample, in order; negative: there is none (core). scores: of those tokens, where
    asked for, by their place in token_ids. prompt_scores: of `Row.scored`, by the row's place in the step.
    """

    token_ids: list[int]
    scores: dict[int, TokenScore] = field(default_factory=dict)
    prompt_scores: dict[int, list[TokenScore]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """What to run now. `slot_copies`, `block_copies`: (from, to), to be copied in this order before the forward."""

    rows: list[Row]
    slot_copies: list[tuple[int, int]]
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts that it computes; to be read before it is committed."""
        return sum(row.num_tokens for row in self.rows if row.sequence.num_computed < row.sequence.num_prompt_tokens)


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
    score: TokenScore | None = None
    prompt_scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    error: RequestError


Action = IssueTicket | RevokeTicket | PushBlocks | PushEnd | CancelPush | Generated | Refused
