"""A request of OpenAI's Responses API as a chat of ours. Nothing is kept between requests."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_engine.server.asked import Asked
from headrace_engine.server.errors import bad_request
from headrace_engine.server.responses_answers import ResponsesFormat
from headrace_engine.server.schema import ChatBody, decode_body


class ResponsesBody(msgspec.Struct):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    headrace_ticket: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # Understood only as "not wanted":
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    include: list[Any] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None


_decoder = msgspec.json.Decoder(ResponsesBody)
_STATE = ("store", "previous_response_id", "conversation", "background", "prompt")
_OTHERS = ("include", "top_logprobs", "max_tool_calls")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def read_responses(raw: bytes) -> Asked:
    """Raises ApiError (400)."""
    body = decode_body(_decoder, raw)
    for name in _STATE:
        if getattr(body, name):
            message = f"{name} is not supported: nothing is kept between requests; send the whole input each time"
            raise bad_request(message, name, "unsupported_value")
    for name in _OTHERS:
        if getattr(body, name):
            raise bad_request(f"{name}={getattr(body, name)!r} is not supported", name, "unsupported_value")
    if body.truncation not in (None, "disabled"):
        raise bad_request("truncation must be disabled: an input is never cut", "truncation", "unsupported_value")
    chat = ChatBody(
        model=body.model,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        response_format=_response_format(body.text),
        headrace_ticket=body.headrace_ticket,
    )
    shown = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
    }
    return Asked(chat, lambda label, model, _: ResponsesFormat(label, model, shown))


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted if isinstance(wanted, dict) else None
    return {"type": "json_schema", "json_schema": {"name": wanted.get("name"), "schema": wanted.get("schema")}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f"{where}: only tools of type function are supported, not {tool.get('type')!r}", "tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: Any) -> Any:
    """A named function is written here without an object of its own."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


# --- input ---


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """What the assistant did in a row (reasoning, text, calls: an item each) becomes one message."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "function_call_output":
            text = _text(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message" and item.get("role") != "assistant":
            if item.get("role") not in _ROLES:
                raise bad_request(f"{where}.role {item.get('role')!r} is none of {', '.join(_ROLES)}", "input")
            messages.append({"role": _ROLES[item["role"]], "content": item.get("content")})
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
            _add_to_assistant(messages[-1], kind, item, where)
        else:
            raise bad_request(f"{where}: an item of type {kind!r} is not supported", "input", "unsupported_value")
    return messages


def _add_to_assistant(message: dict[str, Any], kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        message["content"] += _text(item.get("content"), where)
    elif kind == "reasoning":
        message["reasoning_content"] += _text(item.get("content") or [], where)
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        message["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})


def _text(content: Any, where: str) -> str:
    """A string, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    is_list = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not is_list or not all(isinstance(part.get("text"), str) for part in content):
        raise bad_request(f"{where}: only text is supported", "input", "unsupported_value")
    return "".join(part["text"] for part in content)
