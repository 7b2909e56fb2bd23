"""What a group's frontend and its ranks say to each other (ZMQ, msgpack). One tagged union per direction."""

from __future__ import annotations

import msgspec

from headrace_engine.core import EngineRequest, FinishReason, RequestError, Ticket, TokenScore

# --- frontend -> rank ------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, tag="add"):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort"):
    request_id: str


class Wake(msgspec.Struct, tag="wake"):
    """A rank of this group has work: join the step collective now instead of at the next idle beat."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Leave after the requests in flight have ended."""


class Welcome(msgspec.Struct, tag="welcome"):
    """The frontend has taken the rank's Hello."""


ToRank = Add | Abort | Wake | Shutdown | Welcome

# --- rank -> frontend ------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello"):
    """Weights are loaded and the group is formed: the rank takes requests from now on."""

    rank: int
    incarnation: str
    fingerprint: str
    max_model_len: int
    num_blocks: int


class TicketReady(msgspec.Struct, tag="ticket"):
    request_id: str
    ticket: Ticket


class Tokens(msgspec.Struct, tag="tokens", omit_defaults=True):
    """New tokens of one request; the last one carries the finish reason.

    num_cached_tokens: prompt tokens that prefill found in its prefix cache (never those received from a peer).
    scores: of each of these tokens, if the request asked for them. prompt_scores: of all prompt tokens but the first,
    with the first token of the answer.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    scores: list[TokenScore] = []
    prompt_scores: list[TokenScore] = []


class Pushed(msgspec.Struct, tag="pushed"):
    """PREFILL leg: every byte is written and the peer has been told."""

    request_id: str
    num_cached_tokens: int


class Failed(msgspec.Struct, tag="failed"):
    request_id: str
    error: RequestError


class RankState(msgspec.Struct, tag="state"):
    """A rank's load, sent when it changes, at most every 100 ms."""

    rank: int
    num_running: int
    num_waiting: int
    num_waiting_for_kv: int
    num_pushing: int
    num_free_blocks: int
    num_quarantined_blocks: int
    num_preemptions: int
    num_steps: int
    prompt_tokens_total: int
    generation_tokens_total: int
    num_queued_tokens: int = 0  # prompt tokens yet to be computed
    computed_prompt_tokens_total: int = 0  # those that a prefix cache had are not among them
    prompt_seconds_total: float = 0.0  # of steps that computed tokens of prompts
    # Of the transfer agent, which a unified rank does not have.
    num_peers: int = 0
    kv_bytes_pushed_total: int = 0
    kv_push_seconds_total: float = 0.0
    num_pushes_total: int = 0
    num_push_failures_total: int = 0
    num_receives_total: int = 0
    num_receive_failures_total: int = 0
    num_stale_notices_total: int = 0
    oldest_transfer_age_seconds: float = 0.0


class Batch(msgspec.Struct, tag="batch"):
    """Everything one step has to say, in one message."""

    items: list[TicketReady | Tokens | Pushed | Failed]


FromRank = Hello | RankState | Batch
