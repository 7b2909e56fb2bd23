"""Answers read back: what the formats write comes out again, however it is cut, and slips of a model are forgiven."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.engine.chat.conversations import assistant, call, user

from headrace_engine.chat.formats import ChatFormat, V4Format, V41Format
from headrace_engine.chat.messages import Turn, read_turns, with_tools
from headrace_engine.chat.parse import AnswerParser, Parsed, Tools, tools_of
from headrace_engine.chat.prompt import ASSISTANT, EOS, THINK

FORMATS: dict[str, ChatFormat] = {"v4": V4Format(), "v41": V41Format()}
ANY_TOOL: Tools = {}


@dataclass
class Answer:
    """What a client has put together from an answer's pieces."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, parsed: Parsed) -> None:
        self.reasoning += parsed.reasoning
        self.content += parsed.content
        for piece in parsed.calls:
            if piece.name is not None:
                assert piece.index == len(self.calls)
                self.calls.append((piece.name, ""))
            name, arguments = self.calls[piece.index]
            self.calls[piece.index] = (name, arguments + piece.arguments)

    @property
    def read_calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(parser: AnswerParser, *pieces: str, is_complete: bool = True) -> Answer:
    answer = Answer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.finish(is_complete=is_complete))
    return answer


def thinker(tools: Tools | None = ANY_TOOL) -> AnswerParser:
    return AnswerParser(is_thinking=True, tools=tools)


def talker(tools: Tools | None = ANY_TOOL, max_calls: int | None = None) -> AnswerParser:
    return AnswerParser(is_thinking=False, tools=tools, max_calls=max_calls)


# --- what is written is read back ---

# Words from which tags and their beginnings can arise; whole tags within a text are what the markup cannot say.
_words = st.lists(
    st.sampled_from([*'<>/\n"\\é天 a{', "</", "<think", "think>", "｜DSML", "DSML｜", "\n\n", "\x00", "😀"]), max_size=5
).map("".join)
_texts = _words.filter(lambda text: not any(mark in text for mark in ("｜DSML｜", "<think>", "</think>")))
_keys = _texts.filter(lambda key: not any(c in key for c in '"\n')).map(lambda key: key or "k")
_scalars = st.sampled_from([None, True, 0, -7, 2**70, 1.5, 1e300]) | _texts
_values = (
    _scalars | st.lists(_scalars, max_size=2) | st.dictionaries(_texts, st.lists(_scalars, max_size=1), max_size=1)
)
_arguments = st.dictionaries(_keys, _values, max_size=2)
_calls = st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), _arguments), max_size=2)


def written(chat_format: ChatFormat, reasoning: str, content: str, calls: list[tuple[str, Any]]) -> str:
    """An assistant's turn as it stands in a prompt, behind its header."""
    message = assistant(content, reasoning, [call(name, json.dumps(arguments)) for name, arguments in calls])
    turns: list[Turn] = with_tools(read_turns([user("q"), message]), [{"name": "f"}])
    prompt = "".join(chat_format.render(turns, chat_format.options(None, None)))
    return prompt.rpartition(ASSISTANT + THINK)[2].removesuffix(EOS)


@pytest.mark.parametrize("family", FORMATS)
@given(reasoning=_texts, content=_texts, calls=_calls, rng=st.randoms(use_true_random=False))
@example(reasoning="", content="", calls=[("f", {})], rng=random.Random(0))
@example(reasoning="a\n\n", content="b\n\n\n", calls=[("f", {"a": "<", "b": ["</"]}), ("f", {})], rng=random.Random(0))
@settings(max_examples=40)
def test_what_a_format_writes_is_read_back_however_it_is_cut(
    family: str, reasoning: str, content: str, calls: list[tuple[str, Any]], rng: random.Random
) -> None:
    text = written(FORMATS[family], reasoning, content, calls)
    expected = (reasoning, content, calls)
    whole = read(thinker(), text)
    assert (whole.reasoning, whole.content, whole.read_calls) == expected
    letters = read(thinker(), *text)
    assert letters == whole
    cut = sorted(rng.choices(range(len(text) + 1), k=3))
    assert read(thinker(), *[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]) == whole


@pytest.mark.parametrize("family", FORMATS)
def test_every_cut_in_two_reads_the_same(family: str) -> None:
    calls = [("f", {"a": "x<y", "b": [1, {"c": None}]}), ("g", {})]
    text = written(FORMATS[family], "hm <", "so:\n", calls)
    for position in range(len(text) + 1):
        answer = read(thinker(), text[:position], text[position:])
        assert (answer.reasoning, answer.content, answer.read_calls) == ("hm <", "so:\n", calls)


def test_text_is_shown_as_it_comes_but_for_what_may_be_a_tag() -> None:
    parser = talker()
    shown = [parser.feed(piece).content for piece in ["a", "b<", "c", "d\n", "\n", "e", "<｜DS", "ML x"]]
    assert shown == ["a", "b", "<c", "d", "", "\n\ne", "", "<｜DSML x"]


def test_arguments_stream_as_they_come_and_are_json_at_the_end() -> None:
    parser = talker()
    parser.feed('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">')
    pieces = [parser.feed(piece).calls for piece in ['x "', "\n", "</｜DSML｜parameter>", "\n</｜DSML｜invoke>"]]
    assert [[piece.arguments for piece in calls] for calls in pieces] == [['x \\"'], ["\\n"], ['"'], ["}"]]


# --- slips ---


def block(*lines: str) -> str:
    return "\n".join(("<｜DSML｜tool_calls>", *lines, "</｜DSML｜tool_calls>"))


def invoke(name: str, *lines: str) -> str:
    return "\n".join((f'<｜DSML｜invoke name="{name}">', *lines, "</｜DSML｜invoke>"))


def parameter(name: str, value: str, attribute: str = "") -> str:
    return f'<｜DSML｜parameter name="{name}"{attribute}>{value}</｜DSML｜parameter>'


TRUE, FALSE = ' string="true"', ' string="false"'
SCHEMA: Tools = {"f": frozenset({"a", "b"}), "g": frozenset({"input"})}
OPEN = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">'


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("r</think>c", "r", "c"),
        ("r", "r", ""),
        ("<think>r</think>c", "r", "c"),
        ("r<think>s</think>c", "rs", "c"),
        ("r</think></think>c", "r", "c"),
        ("r</think>\n\n</think>c", "r", "\n\nc"),
        ("r</think><think>s</think>c", "rs", "c"),
        ("r</think>in <think>tags</think>", "r", "in <think>tags</think>"),
        ("a < b </thin", "a < b </thin", ""),
        ("", "", ""),
    ],
)
def test_think_markers(text: str, reasoning: str, content: str) -> None:
    for tools in (None, ANY_TOOL):
        answer = read(thinker(tools), *text)
        assert (answer.reasoning, answer.content, answer.calls) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("declared text", parameter("a", "5", TRUE), {"a": "5"}),
        ("declared JSON", parameter("a", " [5] ", FALSE), {"a": [5]}),
        ("declared JSON that is none", parameter("a", "[5", FALSE), {"a": "[5"}),
        ("nothing declared, JSON", parameter("a", '{"b": 1}'), {"a": {"b": 1}}),
        ("nothing declared, text", parameter("a", "five"), {"a": "five"}),
        ("a number that JSON does not have", parameter("a", "NaN", FALSE), {"a": "NaN"}),
        ("nested beyond measure", parameter("a", "[" * 5_000, FALSE), {"a": "[" * 5_000}),
        ("all digits stay", parameter("a", "1.10000000000000000001", FALSE), {"a": 1.10000000000000000001}),
        ("wrapped", parameter("arguments", '{"a": 1, "b": "x"}', FALSE), {"a": 1, "b": "x"}),
        ("wrapped as text", parameter("input", '{"a": 1}', TRUE), {"a": 1}),
        ("wrapped, nothing declared", parameter("input", '{"a": 1}'), {"a": 1}),
        ("wrapped, unknown name within", parameter("input", '{"c": 1}', FALSE), {"input": {"c": 1}}),
        ("not the only one", parameter("input", "{}", FALSE) + parameter("a", "x", TRUE), {"input": {}, "a": "x"}),
        ("no object in it", parameter("arguments", "[1]", TRUE), {"arguments": "[1]"}),
        ("not closed", '<｜DSML｜parameter name="a" string="true">x', {"a": "x\n"}),
        (
            "not closed before the next",
            '<｜DSML｜parameter name="a" string="true">x' + parameter("b", "1"),
            {"a": "x", "b": 1},
        ),
        ("V4.1's spelling", '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>', {"a": "x"}),
        ("text in between", "so " + parameter("a", "x", TRUE) + " and", {"a": "x"}),
        ("none", "", {}),
    ],
)
def test_parameters(name: str, text: str, arguments: dict[str, Any]) -> None:
    answer = read(talker(SCHEMA), *block(invoke("f", text)))
    assert answer.read_calls == [("f", arguments)]
    assert answer.content == ""


def test_a_wrapper_that_the_schema_knows_is_no_wrapper() -> None:
    answer = read(talker(SCHEMA), block(invoke("g", parameter("input", '{"a": 1}', TRUE))))
    assert answer.read_calls == [("g", {"input": '{"a": 1}'})]
    free = read(talker(ANY_TOOL), block(invoke("g", parameter("input", "{}", FALSE))))
    assert free.read_calls == [("g", {"input": {}})]


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content", "calls"),
    [
        ("behind content", "hi\n\n" + block(invoke("f")), "", "hi", ["f"]),
        ("one line break before it", "hi\n" + block(invoke("f")), "", "hi\n", ["f"]),
        ("text behind it", block(invoke("f")) + "\nDone.", "", "", ["f"]),
        ("a second block", block(invoke("f")) + "\n" + block(invoke("g")), "", "", ["f", "g"]),
        ("several calls", block(invoke("f"), "then", invoke("g")), "", "", ["f", "g"]),
        ("no block around", "hi\n\n" + invoke("f"), "", "hi", ["f"]),
        ("another name of the block", "<｜DSML｜toolcalls>" + invoke("f"), "", "", ["f"]),
        ("the call not closed", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"></｜DSML｜tool_calls>', "", "", ["f"]),
        (
            "the next call opens within",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="f">' + invoke("g"),
            "",
            "",
            ["f", "g"],
        ),
        ("a call without a name", block("<｜DSML｜invoke>", parameter("a", "1"), invoke("g")), "", "", ["g"]),
        ("a closing tag alone", "a</｜DSML｜invoke>b", "", "a</｜DSML｜invoke>b", []),
        ("a tag that is none", "a<｜DSML｜thing>b", "", "a<｜DSML｜thing>b", []),
        ("a tag without end", "a<｜DSML｜invoke b", "", "a<｜DSML｜invoke b", []),
    ],
)
def test_blocks(name: str, text: str, reasoning: str, content: str, calls: list[str]) -> None:
    answer = read(talker(), *text)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert [name for name, arguments in answer.read_calls] == calls


def test_a_block_may_open_within_thought() -> None:
    answer = read(thinker(), *("I need f.\n\n" + block(invoke("f")) + "</think>more"))
    assert (answer.reasoning, answer.content, answer.calls) == ("I need f.", "", [("f", "{}")])


def test_without_tools_on_offer_markup_is_content() -> None:
    text = block(invoke("f", parameter("a", "1")))
    assert read(talker(None), *text) == Answer(content=text)


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = block(invoke("f", parameter("a", "1")), invoke("g", parameter("a", "x", TRUE)))
    assert read(talker(max_calls=1), *text).calls == [("f", '{"a": 1}')]


@pytest.mark.parametrize("tail", ["rm -rf /tmp", "rm -rf /tmp</", "rm -rf /tmp</｜DSML｜para"])
def test_a_call_that_is_cut_off_is_broken_json_unless_the_model_ended_there(tail: str) -> None:
    with pytest.raises(ValueError):
        json.loads(read(talker(), OPEN + tail, is_complete=False).calls[0][1])
    closed = read(talker(), OPEN + tail, is_complete=True).read_calls
    assert closed == [("f", {"a": tail.removesuffix("</｜DSML｜para")})]


def test_the_parser_says_where_it_is() -> None:
    parser = thinker()
    assert parser.is_reasoning
    parser.feed("r</think>c")
    assert (parser.is_reasoning, parser.has_whole_calls) == (False, False)
    parser.feed(OPEN)
    assert not parser.has_whole_calls
    parser.finish(is_complete=True)
    assert parser.has_whole_calls


@given(st.lists(st.sampled_from([OPEN, block(), invoke("f"), "<think>", "</think>", "<", "x\n", '"', "｜DSML｜"])))
@settings(max_examples=40)
def test_any_text_however_broken_reads_the_same_in_letters(parts: list[str]) -> None:
    text = "".join(parts)
    for tools in (None, SCHEMA):
        assert read(thinker(tools), *text) == read(thinker(tools), text)


def test_the_tools_of_a_request() -> None:
    functions = [{"name": "f", "parameters": {"properties": {"a": {}}}}, {"name": "g"}, {"name": "h", "parameters": {}}]
    assert tools_of(functions) == {"f": frozenset({"a"}), "g": None, "h": None}
