"""From the fields of a body to checked sampling parameters."""

from __future__ import annotations

import math
import secrets

import msgspec

from headrace_engine.core import SamplingParams
from headrace_engine.server import schema
from headrace_engine.server.errors import ApiError, bad_request
from headrace_engine.server.schema import CommonBody

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20


def sampling_of(
    body: CommonBody,
    num_prompt_tokens: int,
    *,
    max_model_len: int,
    vocab_size: int,
    default_max_tokens: int | None,
    grammar: str | None = None,
    grammar_after: int | None = None,
    thought_ends: tuple[int, ...] = (),
    leaves_room: bool = False,
) -> SamplingParams:
    """Checked sampling parameters; default_max_tokens None: all the room there is. Raises ApiError (400).

    thought_ends: of an answer that begins with a thought: tokens that end it. leaves_room: the thought may not take all
    of max_tokens.
    """
    max_tokens = _max_tokens(body, num_prompt_tokens, max_model_len, default_max_tokens)
    min_tokens = body.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise bad_request(f"min_tokens must be between 0 and max_tokens ({max_tokens})", "min_tokens")
    top_p = _number(body, "top_p", 1.0, 0, 1)
    if top_p == 0:
        raise bad_request("top_p must be above 0", "top_p")
    top_k = body.top_k or 0
    if top_k < -1:
        raise bad_request("top_k must be -1 or 0 (keep all) or positive", "top_k")
    repetition_penalty = _number(body, "repetition_penalty", 1.0, 0, 100)
    if repetition_penalty == 0:
        raise bad_request("repetition_penalty must be above 0", "repetition_penalty")
    # A seed is drawn here, so that a request that is preempted or retried by its rank draws the same tokens again.
    seed = secrets.randbits(63) if body.seed is None else body.seed
    if not -(2**63) <= seed < 2**64:
        raise bad_request("seed must fit 64 bits", "seed")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", 1.0, 0, 100),
        top_p=top_p,
        top_k=max(0, top_k),
        seed=seed & (2**63 - 1),
        ignore_eos=bool(body.ignore_eos),
        min_p=_number(body, "min_p", 0.0, 0, 1),
        min_tokens=min_tokens,
        stop_token_ids=_stop_token_ids(body, vocab_size),
        logit_bias=_logit_bias(body, vocab_size),
        presence_penalty=_number(body, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, -2, 2),
        repetition_penalty=repetition_penalty,
        num_logprobs=num_logprobs_of(body),
        num_prompt_logprobs=num_prompt_logprobs_of(body),
        grammar=grammar,
        grammar_after=grammar_after,
        max_thought_tokens=_max_thought_tokens(body, max_tokens, leaves_room) if thought_ends else None,
        thought_ends=thought_ends,
    )


def _max_thought_tokens(body: CommonBody, max_tokens: int, leaves_room: bool) -> int | None:
    budget = body.thinking_token_budget
    if budget is not None and budget < 0:
        raise bad_request("thinking_token_budget must not be negative", "thinking_token_budget")
    if leaves_room:
        return min(max_tokens // 2, max_tokens if budget is None else budget)
    return budget


def num_choices_of(body: CommonBody) -> int:
    """`n`. Raises ApiError (400)."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise bad_request(f"n must be between 1 and {MAX_CHOICES}, not {n}", "n")
    if body.best_of not in (None, n):
        raise bad_request("best_of is not supported: every choice is returned", "best_of", "unsupported_value")
    return n


def choice_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """For choice `index` of a prompt's: the same, but for the seed."""
    if index == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & (2**63 - 1))


def num_logprobs_of(body: CommonBody) -> int | None:
    """How many likeliest tokens to score with each generated one, None: no scores. Raises ApiError (400)."""
    top = getattr(body, "top_logprobs", None)
    if isinstance(body, schema.ChatBody):
        if body.logprobs is not None and not isinstance(body.logprobs, bool):
            raise bad_request("logprobs must be true or false in a chat; top_logprobs says how many", "logprobs")
        if not body.logprobs:
            if top:
                raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
            return None
        return _num_scores("top_logprobs", top or 0)
    if body.logprobs is None or body.logprobs is False:
        return None
    if body.logprobs is True:
        raise bad_request("logprobs must be a number in a completion", "logprobs")
    return _num_scores("logprobs", body.logprobs)


def num_prompt_logprobs_of(body: CommonBody) -> int | None:
    """The same for the prompt's tokens: asked for as such, or with echo. Raises ApiError (400)."""
    echoed = num_logprobs_of(body) if getattr(body, "echo", None) else None
    if body.prompt_logprobs is None:
        return echoed
    if body.stream:
        raise bad_request("prompt_logprobs and stream exclude each other", "prompt_logprobs")
    return max(_num_scores("prompt_logprobs", body.prompt_logprobs), echoed or 0)


def _num_scores(name: str, value: int) -> int:
    if not 0 <= value <= MAX_LOGPROBS:
        raise bad_request(f"{name} must be between 0 and {MAX_LOGPROBS}, not {value}", name)
    return value


def stops_of(body: CommonBody) -> tuple[str, ...]:
    """Raises ApiError (400)."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise bad_request(
            f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters", "stop", "invalid_value"
        )
    return tuple(stops)


def too_long(what: str, max_model_len: int) -> ApiError:
    message = f"{what}; this model's context is {max_model_len} tokens, prompt and answer together"
    return bad_request(message, "messages", "context_length_exceeded")


def _max_tokens(body: CommonBody, num_prompt_tokens: int, max_model_len: int, default: int | None) -> int:
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise too_long(f"the prompt has {num_prompt_tokens} tokens", max_model_len)
    name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    wanted: int | None = getattr(body, name)
    if wanted is not None and wanted < 1:
        raise bad_request(f"{name} must be at least 1, not {wanted}", name)
    if wanted is not None and wanted > room:
        message = f"{num_prompt_tokens} prompt tokens and {name}={wanted} make {num_prompt_tokens + wanted}"
        raise too_long(message, max_model_len)
    return wanted or min(room, default or room)


def _stop_token_ids(body: CommonBody, vocab_size: int) -> tuple[int, ...]:
    token_ids = body.stop_token_ids or []
    if len(token_ids) > MAX_STOP_TOKENS or not all(0 <= token < vocab_size for token in token_ids):
        message = f"stop_token_ids: at most {MAX_STOP_TOKENS} token ids in 0..{vocab_size - 1}"
        raise bad_request(message, "stop_token_ids", "invalid_value")
    return tuple(token_ids)


def _logit_bias(body: CommonBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """JSON has no keys but strings, so token ids come as such."""
    biases: dict[int, float] = {}
    for name, bias in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and int(name) < vocab_size):
            raise bad_request(f"logit_bias: {name!r} is no token id in 0..{vocab_size - 1}", "logit_bias")
        if not -100 <= bias <= 100:
            raise bad_request(f"logit_bias: {bias!r} is not between -100 and 100", "logit_bias")
        biases[int(name)] = bias
    if len(biases) > MAX_BIASES:
        raise bad_request(f"logit_bias: at most {MAX_BIASES} tokens", "logit_bias")
    return tuple(biases.items())


def _number(body: CommonBody, name: str, default: float, minimum: float, maximum: float) -> float:
    value = getattr(body, name)
    if value is None:
        return default
    if not math.isfinite(value) or not minimum <= value <= maximum:
        raise bad_request(f"{name} must be between {minimum:g} and {maximum:g}, not {value:g}", name)
    return float(value)
