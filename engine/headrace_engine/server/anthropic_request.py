"""A request of Anthropic's Messages API as a chat of ours."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_engine.server.anthropic_answers import MessagesFormat
from headrace_engine.server.asked import Asked
from headrace_engine.server.errors import ApiError, bad_request
from headrace_engine.server.schema import ChatBody, decode_body


class MessagesBody(msgspec.Struct):
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    headrace_ticket: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(MessagesBody)
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def read_messages(raw: bytes) -> Asked:
    """Raises ApiError (400)."""
    body = decode_body(_decoder, raw)
    if body.max_tokens is None:
        raise bad_request("max_tokens is required", "max_tokens")
    return Asked(chat_of(body), MessagesFormat)


def read_count(raw: bytes) -> ChatBody:
    """The chat whose prompt's tokens are to be counted. Raises ApiError (400)."""
    return chat_of(decode_body(_decoder, raw))


def chat_of(body: MessagesBody) -> ChatBody:
    """Raises ApiError (400)."""
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise bad_request(f"{name} is not supported", name, "unsupported_value")
    choice = body.tool_choice or {}
    effort, output = _output(body)
    thinks = _thinks(body.thinking)
    return ChatBody(
        model=body.model,
        messages=_messages(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])] or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        reasoning_effort=effort if thinks else None,
        thinking_token_budget=_budget(body.thinking) if thinks else None,
        chat_template_kwargs={"thinking": thinks},
        response_format=output,
        headrace_ticket=body.headrace_ticket,
    )


def _thinks(thinking: dict[str, Any] | None) -> bool:
    """This API's answers have no thought unless the request asks for one."""
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise bad_request(f"thinking.type {kind!r} is none of enabled, adaptive, disabled", "thinking")
    return kind != "disabled"


def _budget(thinking: dict[str, Any] | None) -> int | None:
    budget = (thinking or {}).get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise bad_request("thinking.budget_tokens must be a positive number", "thinking")
    return budget


def _output(body: MessagesBody) -> tuple[str | None, dict[str, Any] | None]:
    """(effort, response_format) of output_config, or of the older output_format."""
    config = body.output_config or {}
    wanted = config.get("format") or body.output_format
    if wanted is None:
        return config.get("effort"), None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise bad_request("output_config.format.type must be json_schema", "output_config")
    return config.get("effort"), {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def _tool_choice(choice: dict[str, Any]) -> Any:
    if not choice:
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") not in _CHOICES:
        raise bad_request("tool_choice.type is none of auto, any, tool, none", "tool_choice")
    return _CHOICES[choice["type"]]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"{where}: only tools of the request's own are supported, not {tool['type']!r}", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


# --- messages ---


def _messages(body: MessagesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise bad_request(f"{where}.content must be a string or a list of blocks", where)
        if role == "user":
            messages += [_user_block(block, where) for block in blocks]
        elif role == "assistant":
            messages.append(_assistant(blocks, where))
        else:
            raise bad_request(f"{where}.role {role!r} is neither user nor assistant", where)
    return messages


def _user_block(block: dict[str, Any], where: str) -> dict[str, Any]:
    if block.get("type") == "text":
        return {"role": "user", "content": _text([block], where)}
    if block.get("type") == "tool_result":
        content = block.get("content")
        text = "" if content is None else _text(content, where)
        return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    raise _unsupported(block, where)


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(_text([block], where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # another model's, which says nothing to this one
            raise _unsupported(block, where)
    return {
        "role": "assistant",
        "content": "".join(texts),
        "reasoning_content": "".join(thoughts),
        "tool_calls": calls,
    }


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _unsupported(block, where)
        texts.append(block["text"])
    return "\n\n".join(texts)


def _unsupported(block: Any, where: str) -> ApiError:
    kind = block.get("type") if isinstance(block, dict) else block
    return bad_request(f"{where}: a block of type {kind!r} is not supported here; this engine reads text", where)
