"""The request bodies of the OpenAI surface: what is understood, what is refused, and what comes of it.

Fields that would change the answer and are not supported are refused, never ignored. Unknown fields are ignored, as
clients add their own.
"""

from __future__ import annotations

import math
import secrets
from typing import Any, TypeVar

import msgspec

from headrace_engine.core import SamplingParams
from headrace_engine.server.errors import ApiError, bad_request

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 128


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    headrace_ticket: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # Understood only as "not wanted":
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None


class CompletionBody(_Common, kw_only=True):
    prompt: Any


class ChatBody(_Common, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


BodyT = TypeVar("BodyT", bound=_Common)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
# What each field may be besides absent, because it then asks for what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "min_p": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
}
_ALWAYS_REFUSED = ("prompt_logprobs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def decode_completion(body: bytes) -> CompletionBody:
    """Raises ApiError (400)."""
    return _decode(_completion_decoder, body)


def decode_chat(body: bytes) -> ChatBody:
    """Raises ApiError (400)."""
    parsed = _decode(_chat_decoder, body)
    if parsed.chat_template is not None:
        raise bad_request("a chat_template of the request's own is not supported", "chat_template")
    if parsed.continue_final_message:
        raise bad_request("continue_final_message is not supported", "continue_final_message")
    if parsed.add_generation_prompt is False:
        raise bad_request("add_generation_prompt must be true", "add_generation_prompt")
    for name, value in (parsed.chat_template_kwargs or {}).items():
        if name not in ("thinking", "enable_thinking") or value is not False:
            raise bad_request(f"chat_template_kwargs.{name}={value!r} is not supported", "chat_template_kwargs")
    return parsed


def _decode(decoder: msgspec.json.Decoder[BodyT], body: bytes) -> BodyT:
    try:
        parsed = decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").split("[")[0].split(".")[0] or None
        if param is None and "missing required field `" in message:
            param = message.rsplit("`", 2)[1]
        raise bad_request(f"{param}: {message}" if path else message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    _refuse_unsupported(parsed)
    return parsed


def _refuse_unsupported(body: _Common) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        # By type as well: logprobs=0 asks for the chosen token's, logprobs=false for none.
        if value is not None and not any(value == other and _kind(value) is _kind(other) for other in neutral):
            raise bad_request(f"{name}={value!r} is not supported", name, "unsupported_value")
    for name in _ALWAYS_REFUSED:
        if getattr(body, name) is not None:
            raise bad_request(f"{name} is not supported", name, "unsupported_value")


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def sampling_of(
    body: _Common, num_prompt_tokens: int, max_model_len: int, default_max_tokens: int | None
) -> SamplingParams:
    """Checked sampling parameters; default_max_tokens None: all the room there is. Raises ApiError (400)."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise too_long(f"the prompt has {num_prompt_tokens} tokens", max_model_len)
    name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    wanted = getattr(body, name)
    if wanted is not None and wanted < 1:
        raise bad_request(f"{name} must be at least 1, not {wanted}", name)
    if wanted is not None and wanted > room:
        message = f"{num_prompt_tokens} prompt tokens and {name}={wanted} make {num_prompt_tokens + wanted}"
        raise too_long(message, max_model_len)
    max_tokens = wanted or min(room, default_max_tokens or room)
    temperature = _number(body, "temperature", 1.0, 0, 100)
    top_p = _number(body, "top_p", 1.0, 0, 1)
    if top_p == 0:
        raise bad_request("top_p must be above 0", "top_p")
    top_k = body.top_k or 0
    if top_k < -1:
        raise bad_request("top_k must be -1 or 0 (keep all) or positive", "top_k")
    # A seed is drawn here, so that a request that is preempted or retried by its rank draws the same tokens again.
    seed = secrets.randbits(63) if body.seed is None else body.seed
    if not -(2**63) <= seed < 2**64:
        raise bad_request("seed must fit 64 bits", "seed")
    return SamplingParams(max_tokens, temperature, top_p, max(0, top_k), seed & (2**63 - 1), bool(body.ignore_eos))


def too_long(what: str, max_model_len: int) -> ApiError:
    message = f"{what}; this model's context is {max_model_len} tokens, prompt and answer together"
    return bad_request(message, "messages", "context_length_exceeded")


def stops_of(body: _Common) -> tuple[str, ...]:
    """Raises ApiError (400)."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise bad_request(
            f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters", "stop", "invalid_value"
        )
    return tuple(stops)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """One entry per choice: text, or token ids. Raises ApiError (400)."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt()
    if all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts in one request", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in prompt):
        return prompt
    raise _bad_prompt()


def _bad_prompt() -> ApiError:
    return bad_request("prompt must be a string, a list of strings, token ids, or a list of token ids lists", "prompt")


def _number(body: _Common, name: str, default: float, minimum: float, maximum: float) -> float:
    value = getattr(body, name)
    if value is None:
        return default
    if not math.isfinite(value) or not minimum <= value <= maximum:
        raise bad_request(f"{name} must be between {minimum:g} and {maximum:g}, not {value:g}", name)
    return float(value)
