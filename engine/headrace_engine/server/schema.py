"""The request bodies of the OpenAI surface: what is understood, what is refused, and what comes of it.

Fields that would change the answer and are not supported are refused, never ignored. Unknown fields are ignored, as
clients add their own.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from headrace_engine.server.errors import ApiError, bad_request

MAX_PROMPTS = 128


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    headrace_ticket: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # Understood only as "not wanted":
    suffix: str | None = None
    bad_words: list[str] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | int | None = None
    thinking_token_budget: int | None = None


class CompletionBody(CommonBody, kw_only=True):
    prompt: Any
    echo: bool | None = None


class ChatBody(CommonBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None


BodyT = TypeVar("BodyT", bound=CommonBody)
StructT = TypeVar("StructT", bound=msgspec.Struct)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
# What each field may be besides absent, because it then asks for what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
}
_OF_CHATS = (
    "tools",
    "tool_choice",
    "reasoning_effort",
    "thinking_token_budget",
)  # what a chat may ask for; see chat.py
_ALWAYS_REFUSED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


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
    return parsed


def _decode(decoder: msgspec.json.Decoder[BodyT], body: bytes) -> BodyT:
    parsed = decode_body(decoder, body)
    _refuse_unsupported(parsed)
    return parsed


def decode_body(decoder: msgspec.json.Decoder[StructT], body: bytes) -> StructT:
    """Raises ApiError (400) that names the field."""
    try:
        return decoder.decode(body)
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


def _refuse_unsupported(body: CommonBody) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if name in _OF_CHATS and isinstance(body, ChatBody):
            continue
        if value is not None and value not in neutral:
            raise bad_request(f"{name}={value!r} is not supported", name, "unsupported_value")
    for name in _ALWAYS_REFUSED:
        if getattr(body, name) is not None:
            raise bad_request(f"{name} is not supported; use structured_outputs", name, "unsupported_value")


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
