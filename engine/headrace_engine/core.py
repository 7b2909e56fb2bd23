"""The engine's nouns: what a request is, how it ends, what a ticket says.

Everything imports this module; it imports nothing of ours and no torch. The structs travel between processes
(frontend and ranks) and between groups (tickets), so they are msgspec structs: typed, small, fast to encode.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Sequence as SequenceOf

import msgspec


class Role(enum.StrEnum):
    """What an engine does: one phase, or both (`unified`)."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class Leg(enum.StrEnum):
    """What one engine is asked to do for a request.

    WHOLE: prompt and generation on this engine. DECODE: reserve, hand out a ticket, wait for the KV, generate;
    compute the prompt without a ticket if its tokens are to be scored.
    PREFILL: compute the prompt and push its KV to where the ticket says; generate nothing.
    """

    WHOLE = "whole"
    DECODE = "decode"
    PREFILL = "prefill"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-sequence token, a stop token of the request, or a stop string
    LENGTH = "length"  # max_tokens or the model's context is reached
    ABORT = "abort"  # the client left, or the group is draining
    ERROR = "error"  # see RequestError


NOT_FINITE = -1  # in place of a token: the model's logits are no numbers
GRAMMAR_FAILED = -2  # in place of a token: the grammar allows none, or is too complex to say


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """What the model itself thought of one token: natural logarithms of its own probabilities, before any adjustment,
    temperature or truncation. rank: 1 is the likeliest. top: the likeliest tokens with theirs, likeliest first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose tokens. temperature 0 is greedy; top_k 0 keeps all; seed None draws a fresh one.

    min_p: of the likeliest token's probability, below which others are dropped. min_tokens: so many come before any
    end but that of max_tokens. stop_token_ids end an answer beside the model's own, even with ignore_eos.
    logit_bias: (token, what is added to its logit). Penalties: see sampling.adjust.
    num_logprobs: how many likeliest tokens to score beside each generated one; None: score nothing.
    num_prompt_logprobs: the same for the tokens of the prompt but the first.
    grammar: what the answer must follow (see sampling.grammar), from behind the first token grammar_after on, if given.
    max_thought_tokens: of an answer that begins with a thought: if none of the tokens thought_ends is among so many,
    the first of them comes next.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str | None = None
    grammar_after: int | None = None
    max_thought_tokens: int | None = None
    thought_ends: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def adjusts_logits(self) -> bool:
        """Whether a step must touch this request's logits before a token is chosen."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.has_penalties
            or self.grammar is not None
            or self.max_thought_tokens is not None
        )


class Region(msgspec.Struct, frozen=True):
    """One cache tensor as a peer sees it: `num_items` items of `item_bytes`, contiguous from `base_address`.

    A paged group's item is one block (all its layers together); a state group's item is one sequence's slot.
    """

    name: str
    base_address: int
    item_bytes: int
    num_items: int


class Peer(msgspec.Struct, frozen=True):
    """How to write into one rank's cache: its NIXL agent and its regions, valid for one incarnation."""

    agent_name: str  # contains the incarnation, so that a restarted process is another peer
    agent_metadata: bytes  # NIXL's opaque blob, about 500 bytes
    regions: tuple[Region, ...]


class Ticket(msgspec.Struct, frozen=True):
    """Where prefill must push one request's KV, and the proof that both sides mean the same request.

    State is shipped as of `num_tokens - 1` tokens: decode runs the last prompt token itself, so that sampling
    lives in one place. `generation` is unique within an incarnation: a completion for another one is stale.
    """

    incarnation: str
    request_id: str
    generation: int
    fingerprint: str  # KV fingerprint: the two caches have the same bytes for the same tokens
    num_tokens: int
    token_hash: str  # hash_tokens of all prompt tokens
    num_held_tokens: int  # leading tokens whose blocks decode has already; a multiple of the block size
    block_ids: tuple[int, ...]  # destination of block i of the sequence, counted from token 0
    state_slot: int
    lease_seconds: float  # from receipt: no write may start after it
    peer: Peer
    prompt_index: int = 0  # which of the request's prompts it is for
    num_prompts: int = 1  # that many tickets the request has


class RequestError(msgspec.Struct, frozen=True):
    """Why a request failed, in the OpenAI error vocabulary. `retriable`: another group may succeed."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retriable: bool = False


class EngineRequest(msgspec.Struct):
    """One request as the frontend hands it to a rank: token ids in, no text.

    shares_kv_of: id of another DECODE request with the same prompt, given to this rank before: what its ticket brings
    serves this one too, which gets no ticket.
    """

    request_id: str
    leg: Leg
    prompt_token_ids: list[int]
    sampling: SamplingParams
    ticket: Ticket | None = None  # PREFILL only
    shares_kv_of: str | None = None  # DECODE only


def hash_tokens(token_ids: SequenceOf[int]) -> str:
    """A 128-bit hash of token ids (as little-endian int32), equal on both sides iff the prompts are."""
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=16).hexdigest()
