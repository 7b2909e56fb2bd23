"""Prompts of conversations: equal, letter by letter, to those of the encoders that the models are served with."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.chat.conversations import CONVERSATIONS, EFFORTS, assistant, user

from headrace_engine.chat.errors import ChatError
from headrace_engine.chat.formats import ChatFormat, V4Format, V41Format, format_of
from headrace_engine.chat.messages import read_functions, read_turns, with_tools
from headrace_engine.chat.options import ChatOptions
from headrace_engine.chat.prompt import BOS, END_THINK, EOS, MARKERS, USER, Marker

FORMATS: dict[str, ChatFormat] = {"v4": V4Format(), "v41": V41Format()}
GOLDEN = {
    name: json.loads(Path(__file__).with_name("golden").joinpath(f"{name}.json").read_text(encoding="utf-8"))
    for name in FORMATS
}


def prompt_of(chat_format: ChatFormat, conversation: dict[str, Any], options: ChatOptions) -> list[str]:
    turns = with_tools(read_turns(conversation["messages"]), read_functions(conversation.get("tools", [])))
    return chat_format.render(turns, options)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("mode", ["thinking", "chat"])
@pytest.mark.parametrize("family", FORMATS)
def test_prompts_equal_the_oracles(family: str, mode: str, name: str) -> None:
    conversation, chat_format = CONVERSATIONS[name], FORMATS[family]
    drops = conversation.get("drop_thinking", True)
    options = ChatOptions(mode == "thinking", chat_format.effort_of("low"), drops)
    assert "".join(prompt_of(chat_format, conversation, options)) == GOLDEN[family][f"{name} | {mode}"]


@pytest.mark.parametrize("name", ["one question", "a system text"])
@pytest.mark.parametrize(("family", "effort"), [(f, e) for f, efforts in EFFORTS.items() for e in efforts])
def test_efforts_equal_the_oracles(family: str, effort: str | int, name: str) -> None:
    options = FORMATS[family].options(effort, None)
    prompt = "".join(prompt_of(FORMATS[family], CONVERSATIONS[name], options))
    assert prompt == GOLDEN[family][f"{name} | effort {effort}"]


def test_every_golden_prompt_is_compared() -> None:
    compared = {f"{name} | {mode}" for name in CONVERSATIONS for mode in ("thinking", "chat")}
    for family, efforts in EFFORTS.items():
        tried = {f"{name} | effort {e}" for name in ("one question", "a system text") for e in efforts}
        assert set(GOLDEN[family]) == compared | tried


@pytest.mark.parametrize("family", FORMATS)
@given(text=st.lists(st.sampled_from([*MARKERS, "a", "\n", '"']), max_size=6).map("".join))
@settings(max_examples=30)
def test_a_clients_text_never_becomes_a_marker(family: str, text: str) -> None:
    def markers(words: str) -> list[str]:
        calls = [{"id": "x", "function": {"name": "f", "arguments": json.dumps({"k": words, "j": [words]})}}]
        messages = [
            {"role": "system", "content": words},
            user(words),
            assistant(words, reasoning=words, calls=calls),
            {"role": "tool", "tool_call_id": "x", "content": words},
        ]
        tools = [{"type": "function", "function": {"name": "f", "description": words}}]
        chat_format = FORMATS[family]
        pieces = prompt_of(chat_format, {"messages": messages, "tools": tools}, chat_format.options(None, None))
        kinds = [isinstance(piece, Marker) for piece in pieces]
        assert (False, False) not in pairwise(kinds), "two texts in a row would be tokenized apart"
        return [piece for piece in pieces if isinstance(piece, Marker)]

    assert markers(text) == markers("a")


@pytest.mark.parametrize(
    ("family", "effort", "template_kwargs", "expected"),
    [
        ("v4", None, None, ChatOptions(True, "high")),
        ("v4", "none", None, ChatOptions(False, "high")),
        ("v4", "xhigh", None, ChatOptions(True, "high")),
        ("v4", "minimal", None, ChatOptions(True, "low")),
        ("v4", "medium", None, ChatOptions(True, "low")),
        ("v4", "max", {"thinking": True}, ChatOptions(True, "max")),
        ("v4", None, {"thinking": False}, ChatOptions(False, "high")),
        ("v4", None, {"enable_thinking": False, "drop_thinking": False}, ChatOptions(False, "high", False)),
        ("v4", None, {"reasoning_effort": "low"}, ChatOptions(True, "low")),
        ("v4", "none", {"thinking": True}, ChatOptions(False, "high")),
        ("v41", None, None, ChatOptions(True, 75)),
        ("v41", "low", None, ChatOptions(True, 50)),
        ("v41", "xhigh", None, ChatOptions(True, 75)),
        ("v41", 7, {"reasoning_effort": 7}, ChatOptions(True, 7)),
    ],
)
def test_what_a_request_says_of_thinking(family: str, effort: Any, template_kwargs: Any, expected: ChatOptions) -> None:
    assert FORMATS[family].options(effort, template_kwargs) == expected


@pytest.mark.parametrize(
    ("effort", "template_kwargs", "is_thinking"),
    [(None, None, False), ("high", None, True), ("none", None, False), ("high", {"thinking": False}, False)],
)
def test_a_model_that_thinks_only_if_asked(effort: Any, template_kwargs: Any, is_thinking: bool) -> None:
    assert V4Format(thinks_by_default=False).options(effort, template_kwargs).is_thinking is is_thinking


@pytest.mark.parametrize(
    ("family", "effort", "template_kwargs", "param"),
    [
        ("v4", "extreme", None, "reasoning_effort"),
        ("v4", 50, None, "reasoning_effort"),
        ("v4", True, None, "reasoning_effort"),
        ("v4", "low", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("v4", None, {"thinking": "yes"}, "chat_template_kwargs"),
        ("v4", None, {"temperature": 1}, "chat_template_kwargs"),
        ("v41", "medium", None, "reasoning_effort"),
        ("v41", 0, None, "reasoning_effort"),
        ("v41", 101, None, "reasoning_effort"),
    ],
)
def test_thinking_that_the_model_does_not_know_is_refused(
    family: str, effort: Any, template_kwargs: Any, param: str
) -> None:
    with pytest.raises(ChatError) as caught:
        FORMATS[family].options(effort, template_kwargs)
    assert caught.value.param == param


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "empty"),
        ([{"role": "wizard", "content": "x"}], "messages[0]", "'wizard'"),
        ([{"content": "x"}], "messages[0]", "None"),
        ([user("x"), user(None)], "messages[1]", "content"),
        ([user([{"type": "image_url"}])], "messages[0]", "image_url is not supported"),
        ([user([{"type": "text", "text": 1}])], "messages[0]", "type text"),
        ([{"role": "developer", "content": ""}], "messages[0]", "developer"),
        ([{"role": "assistant"}], "messages[0]", "needs content"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0]", "function_call"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0]", "tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0]", "list"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 'a"b'}}]}], "messages[0]", "quote"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0]", "arguments"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}], "messages[0]", "id"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 3}], "messages[0]", "reasoning_content"),
        ([{"role": "tool", "tool_call_id": 3, "content": "x"}], "messages[0]", "tool_call_id"),
        ([{"role": "system", "content": "x", "tools": [1]}], "messages[0].tools", "tools[0]"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(messages: Any, param: str, words: str) -> None:
    with pytest.raises(ChatError, match=words.replace("[", r"\[").replace("]", r"\]")) as caught:
        read_turns(messages)
    assert caught.value.param == param


def test_broken_arguments_of_a_call_stay_in_the_history() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"city": "Par'}}]
    pieces = prompt_of(V4Format(), {"messages": [user("a"), assistant("", calls=calls), user("b")]}, ChatOptions())
    assert 'name="arguments" string="true">{"city": "Par</' in "".join(pieces)


def test_a_format_belongs_to_a_model_type() -> None:
    assert isinstance(format_of("deepseek_v4"), V4Format)
    assert isinstance(format_of("deepseek_v41"), V41Format)
    with pytest.raises(KeyError):
        format_of("llama")


def test_markers_are_pieces_of_their_own() -> None:
    pieces = prompt_of(V4Format(), {"messages": [user("Hi")]}, ChatOptions(False))
    assert pieces == [BOS, USER, "Hi", "<｜Assistant｜>", END_THINK]
    assert [isinstance(piece, Marker) for piece in pieces] == [True, True, False, True, True]
    assert EOS in MARKERS
