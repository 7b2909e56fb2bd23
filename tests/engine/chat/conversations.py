"""Conversations whose prompts are pinned, for every format: by name, the fields of a request."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, e.g. 杭州",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "number"}}}


def system(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": text, **fields}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, reasoning: str | None = None, calls: Any = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls is not None:
        message["tool_calls"] = calls
    return message


def call(name: str, arguments: str, call_id: str = "") -> dict[str, Any]:
    fields = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **fields} if call_id else fields


def result(text: Any, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def reminder(text: str) -> dict[str, Any]:
    return {"role": "latest_reminder", "content": text}


_TWO_TURNS = [user("1+1?"), assistant("2", reasoning="Add them."), user("And 2+2?")]
_ASKED = [user("Weather in 杭州 and Paris?")]
_CALLS = [
    call("get_weather", '{"city": "杭州", "days": 2}', "a"),
    call("get_weather", '{"days": 1.5, "city": "Paris", "flags": [true, null, {"x": "é"}]}', "b"),
]
_CALLED = [*_ASKED, assistant("Let me look.", reasoning="Two cities.", calls=_CALLS)]
_ANSWERED = [*_CALLED, result("rain", "b"), result("sun", "a")]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [user("Hi")]},
    "a system text": {"messages": [system("Be brief."), user("Hi")]},
    "an empty system text": {"messages": [system(""), user("Hi")]},
    "text parts": {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]},
    "messages of a user in a row": {"messages": [user("a"), user(""), user("b")]},
    "white space stays": {"messages": [user("  a\n"), assistant("\n b "), user("c ")]},
    "two turns": {"messages": _TWO_TURNS},
    "two turns, reasoning kept": {"messages": _TWO_TURNS, "drop_thinking": False},
    "reasoning behind the last question": {"messages": [*_TWO_TURNS, assistant("4", reasoning="Double.")]},
    "an answer without reasoning": {"messages": [user("a"), assistant("b")], "drop_thinking": False},
    "assistants in a row": {"messages": [user("a"), assistant("b"), assistant("c"), user("d")]},
    "an assistant first": {"messages": [assistant("Welcome."), user("Hi")]},
    "a system text in the middle": {"messages": [*_TWO_TURNS[:2], system("Now in French."), user("Et 2+2?")]},
    "a system text at the end": {"messages": [*_TWO_TURNS[:2], system("Say goodbye.")]},
    "a system text before an answer": {"messages": [user("a"), system("s"), assistant("b"), user("c")]},
    "two system texts": {"messages": [system("a"), system("b"), user("c")]},
    "a developer": {"messages": [{"role": "developer", "content": "Be kind."}]},
    "a developer of an earlier turn": {
        "messages": [{"role": "developer", "content": "d"}, user("a"), assistant("b", reasoning="r"), user("c")],
    },
    "a developer with tools": {"messages": [{"role": "developer", "content": "d", "tools": [CLOCK]}]},
    "a reminder": {"messages": [user("a"), assistant("b"), reminder("Today is Monday."), user("c")]},
    "a reminder behind a question": {"messages": [user("a"), reminder("m"), assistant("b"), user("c")]},
    "tools": {"messages": [system("Be brief."), *_ASKED], "tools": [WEATHER, CLOCK]},
    "tools without a system text": {"messages": _ASKED, "tools": [WEATHER]},
    "tools keep all reasoning": {"messages": _TWO_TURNS, "tools": [CLOCK]},
    "tools and a later system text": {"messages": [*_TWO_TURNS[:2], system("s"), user("c")], "tools": [CLOCK]},
    "tool results in the order of the calls": {"messages": _ANSWERED, "tools": [WEATHER]},
    "tool results and the next question": {"messages": [*_ANSWERED, user("Which is better?")], "tools": [WEATHER]},
    "tool results of a turn that is over": {
        "messages": [*_ANSWERED, assistant("Sun and rain.", reasoning="Done."), user("Thanks")],
        "tools": [WEATHER],
    },
    "calls without tools": {"messages": [*_ANSWERED, assistant("So.", reasoning="r"), user("x")]},
    "results without tools": {"messages": _ANSWERED},
    "a call without text or arguments": {
        "messages": [user("t"), assistant(None, calls=[call("clock", "{}")]), result("12:00")],
        "tools": [CLOCK],
    },
    "a result in parts": {
        "messages": [*_CALLED, result([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])],
        "tools": [WEATHER],
    },
    "a response format": {"messages": [system("s", response_format=SCHEMA), user("a")]},
    "a response format and tools": {"messages": [system("s", response_format=SCHEMA), user("a")], "tools": [CLOCK]},
}
# Efforts that mean the same to a client are the same prompt, so each is pinned once.
EFFORTS = {"v4": ("low", "high", "max"), "v41": ("low", "high", "max", 1, 33, 100)}
