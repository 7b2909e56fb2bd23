"""Scores of tokens as OpenAI and vLLM write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_engine.core import TokenScore
from headrace_engine.server.tokenize import REPLACEMENT, Tokenizer


def chat_logprobs(scores: Sequence[TokenScore], tokenizer: Tokenizer) -> dict[str, Any]:
    """A chat choice's `logprobs`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            {
                **entry(score.token_id, score.logprob),
                "top_logprobs": [entry(token_id, logprob) for token_id, logprob in score.top],
            }
            for score in scores
        ],
        "refusal": None,
    }


def completion_logprobs(
    scores: Sequence[TokenScore | None], token_ids: Sequence[int], tokenizer: Tokenizer, first_offset: int
) -> dict[str, Any]:
    """A completion choice's `logprobs`. scores: None for a prompt's first token, which nothing comes before.

    first_offset: characters of the choice's text before these tokens.
    """
    tokens = [_name(token_id, tokenizer) for token_id in token_ids]
    offsets, offset = [], first_offset
    for token_id in token_ids:
        offsets.append(offset)
        offset += num_chars(token_id, tokenizer)
    return {
        "tokens": tokens,
        "token_logprobs": [None if score is None else score.logprob for score in scores],
        "top_logprobs": [None if score is None else _by_name(score, tokenizer) for score in scores],
        "text_offset": offsets,
    }


def prompt_logprobs(scores: Sequence[TokenScore], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token among the likeliest; none for the first token."""
    return [None, *({str(token_id): entry for token_id, entry in _ranked(score, tokenizer)} for score in scores)]


def num_chars(token_id: int, tokenizer: Tokenizer) -> int:
    """Characters that begin in this token."""
    text = tokenizer.token_bytes(token_id)
    return sum(byte & 0xC0 != 0x80 for byte in text)


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as a key: one that is no whole text is written as its bytes, so that two of them stay two."""
    raw = tokenizer.token_bytes(token_id)
    text = raw.decode("utf-8", "replace")
    return text if REPLACEMENT not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _by_name(score: TokenScore, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens, and the token itself even if it is none of them."""
    return {_name(token_id, tokenizer): logprob for token_id, logprob in (*score.top, (score.token_id, score.logprob))}


def _ranked(score: TokenScore, tokenizer: Tokenizer) -> list[tuple[int, dict[str, Any]]]:
    entries = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(score.top, 1)}
    entries[score.token_id] = (score.logprob, score.rank)
    return [
        (
            token_id,
            {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
            },
        )
        for token_id, (logprob, rank) in entries.items()
    ]
