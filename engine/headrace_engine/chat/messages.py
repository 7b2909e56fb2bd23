"""From OpenAI's messages to turns: every message checked, tool results put where the model expects them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace_engine.chat.call_grammar import check_strict
from headrace_engine.chat.dsml import ToolCall
from headrace_engine.chat.errors import ChatError

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file")


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered. call_id: "" if the client did not say which call it belongs to."""

    call_id: str
    text: str


@dataclass
class Turn:
    """One turn of a conversation. `parts` are a user's; messages of users and tools in a row make one turn."""

    role: str  # "system" | "developer" | "user" | "assistant" | "latest_reminder"
    text: str = ""
    parts: list[str | ToolResult] = field(default_factory=list)
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    functions: list[dict[str, Any]] = field(default_factory=list)  # tools offered here
    response_format: Any = None

    @property
    def has_words(self) -> bool:
        """Whether there is more in a user's turn than tool results."""
        return any(isinstance(part, str) for part in self.parts)


def read_turns(messages: Sequence[dict[str, Any]]) -> list[Turn]:
    """Raises ChatError."""
    if not messages:
        raise ChatError("messages must not be empty")
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        turn = _read(message, f"messages[{index}]")
        if turn.role == "user" and turns and turns[-1].role == "user":
            turns[-1].parts += turn.parts
        else:
            turns.append(turn)
    _order_results(turns)
    return turns


def with_tools(turns: Sequence[Turn], functions: Sequence[dict[str, Any]]) -> list[Turn]:
    """The turns, with a request's own tools at the first system text; an empty one is made if there is none."""
    turns = list(turns)
    if functions:
        index = next((index for index, turn in enumerate(turns) if turn.role == "system"), None)
        if index is None:
            turns.insert(0, Turn("system"))
        turns[index or 0] = replace(turns[index or 0], functions=list(functions))
    return turns


def read_functions(tools: Any, where: str = "tools") -> list[dict[str, Any]]:
    """OpenAI's `tools` as the functions in them. Raises ChatError."""
    if not isinstance(tools, list):
        raise ChatError(f"{where} must be a list", where)
    functions = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ChatError(f'{where}[{index}] must be {{"type": "function", "function": {{...}}}}', where)
        _check_name(function.get("name"), f"{where}[{index}].function.name", where)
        if not isinstance(function.get("parameters", {}), dict | None):
            raise ChatError(f"{where}[{index}].function.parameters must be a JSON schema", where)
        if function.get("strict"):
            check_strict(function, f"{where}[{index}].function", where)
        functions.append(function)
    return functions


def _read(message: dict[str, Any], where: str) -> Turn:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ChatError(f"{where}.role {role!r} is not one of {', '.join(_ROLES)}", where)
    if message.get("function_call"):
        raise ChatError(f"{where}.function_call is not supported; use tool_calls", where)
    if role == "assistant":
        return _read_assistant(message, where)
    if role == "tool":
        call_id = message.get("tool_call_id") or ""
        if not isinstance(call_id, str):
            raise ChatError(f"{where}.tool_call_id must be a string", where)
        return Turn("user", parts=[ToolResult(call_id, "" if content is None else _text(content, where))])
    text = _text(content, where)
    if role == "user":
        return Turn("user", parts=[text])
    if role == "latest_reminder":
        return Turn(role, text)
    if role == "developer" and not text:
        raise ChatError(f"{where}: a developer message must not be empty", where)
    functions = read_functions(message.get("tools") or [], f"{where}.tools")
    return Turn(role, text, functions=functions, response_format=message.get("response_format"))


def _read_assistant(message: dict[str, Any], where: str) -> Turn:
    content = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise ChatError(f"{where}.reasoning_content must be a string", where)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatError(f"{where}.tool_calls must be a list", where)
    if content is None and not calls and not reasoning:
        raise ChatError(f"{where}: an assistant message needs content, tool_calls or reasoning_content", where)
    return Turn(
        "assistant",
        "" if content is None else _text(content, where),
        reasoning=reasoning,
        calls=[_read_call(call, f"{where}.tool_calls[{index}]", where) for index, call in enumerate(calls)],
    )


def _read_call(call: Any, what: str, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ChatError(f'{what} must be {{"id": ..., "type": "function", "function": {{...}}}}', where)
    name = function.get("name")
    _check_name(name, f"{what}.function.name", where)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise ChatError(f"{what}.function.arguments must be JSON text", where)
    call_id = call.get("id") or ""
    if not isinstance(call_id, str):
        raise ChatError(f"{what}.id must be a string", where)
    return ToolCall(call_id, str(name), arguments)


def _check_name(name: Any, what: str, param: str) -> None:
    # The markup has no escapes: such a name could not be read back.
    if not isinstance(name, str) or not 0 < len(name) <= 256 or any(c in '"<>\n' for c in name):
        raise ChatError(f'{what} must be 1 to 256 characters, none of them a quote, "<", ">" or a line break', param)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{where}.content must be a string or a list of text parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA_PARTS:
            raise ChatError(f"{where}.content: a part of type {kind} is not supported, this engine reads text", where)
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ChatError(f"{where}.content: only parts of type text are supported", where)
        texts.append(part["text"])
    return "\n\n".join(texts)


def _order_results(turns: Sequence[Turn]) -> None:
    """Tool results of one turn, in the order of the calls before them; the user's texts stay where they are."""
    order: dict[str, int] = {}
    for turn in turns:
        if turn.calls:
            order = {call.id: index for index, call in enumerate(turn.calls) if call.id}
        results = [part for part in turn.parts if isinstance(part, ToolResult)]
        if len(results) < 2 or not order:
            continue
        ordered = iter(sorted(results, key=lambda result: order.get(result.call_id, 0)))
        turn.parts = [next(ordered) if isinstance(part, ToolResult) else part for part in turn.parts]
