"""Requests of OpenAI's completions and chat completions."""

from __future__ import annotations

from headrace_engine.server.answers import Format
from headrace_engine.server.asked import Asked
from headrace_engine.server.sampling import num_choices_of, num_logprobs_of
from headrace_engine.server.schema import ChatBody, CompletionBody, decode_chat, decode_completion
from headrace_engine.server.tokenize import Tokenizer


def read_completion(raw: bytes) -> Asked:
    """Raises ApiError (400)."""
    return _asked(decode_completion(raw))


def read_chat(raw: bytes) -> Asked:
    """Raises ApiError (400)."""
    return _asked(decode_chat(raw))


def _asked(body: ChatBody | CompletionBody) -> Asked:
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    num_choices = num_choices_of(body)
    with_logprobs = num_logprobs_of(body) is not None

    def make_format(label: str, model: str, tokenizer: Tokenizer) -> Format:
        return Format(
            label,
            model,
            tokenizer,
            is_chat=isinstance(body, ChatBody),
            num_choices=num_choices,
            with_token_ids=bool(body.return_token_ids),
            with_usage=with_usage,
            with_running_usage=bool(with_usage and options and options.continuous_usage_stats),
            with_logprobs=with_logprobs,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            echoes=isinstance(body, CompletionBody) and bool(body.echo),
        )

    return Asked(body, make_format)
