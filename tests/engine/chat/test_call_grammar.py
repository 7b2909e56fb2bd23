"""Calls that are forced or strict: grammars take what the formats write, and nothing that the tools' schemas do not."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.engine.chat.conversations import assistant, call, user
from tests.engine.chat.test_parse import read, talker

from headrace_engine.chat.call_grammar import FORM, calls_grammar, calls_or_form_grammar, check_strict, strict_grammar
from headrace_engine.chat.dsml import V4_DIALECT, V41_DIALECT
from headrace_engine.chat.errors import ChatError
from headrace_engine.chat.formats import ChatFormat, V4Format, V41Format
from headrace_engine.chat.messages import read_turns
from headrace_engine.chat.options import ChatOptions
from headrace_engine.chat.prompt import ASSISTANT, END_THINK, EOS
from headrace_engine.models.deepseek_v4.tiny_tokenizer import VOCAB_SIZE, write_tokenizer
from headrace_engine.sampling.grammar import (
    GrammarCompiler,
    GrammarError,
    Guide,
    of_choice,
    of_grammar,
    of_json_schema,
    of_regex,
    with_named,
)
from headrace_engine.server.tokenize import Tokenizer

FORMATS: dict[str, ChatFormat] = {"v4": V4Format(), "v41": V41Format()}
EOS_ID = 1
PICK: dict[str, Any] = {
    "name": "pick",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "any"},
            "colour": {"type": "string", "enum": ["red", 'a "b"']},
            "count": {"$ref": "#/$defs/digit"},
            "short": {"type": "string", "maxLength": 3},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["text", "count"],
        "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
}
NOTHING = {"name": "nothing", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
ANYTHING = {"name": "any.thing"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 4096)
    return folder


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder / "tokenizer.json", VOCAB_SIZE, [EOS_ID])


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def written(family: str, calls: list[tuple[str, Any]]) -> str:
    message = assistant("", calls=[call(name, json.dumps(arguments)) for name, arguments in calls])
    pieces = FORMATS[family].render(read_turns([user("q"), message]), ChatOptions(is_thinking=False))
    return "".join(pieces).rpartition(ASSISTANT + END_THINK)[2].removesuffix(EOS)


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize(
    ("calls", "max_calls", "is_taken"),
    [
        ([("pick", {"text": '<a>\n"b"', "count": 3})], None, True),
        ([("pick", {"text": "", "colour": 'a "b"', "count": 0, "flags": [True]})], None, True),
        ([("nothing", {}), ("pick", {"text": "x", "count": 1})], None, True),
        ([("any.thing", {"a": "b", "c": [1, {"d": None}]})], None, True),
        ([("nothing", {}), ("nothing", {})], 1, False),
        ([("nothing", {"a": 1})], None, False),
        ([("other", {})], None, False),
        ([("pick", {"text": "x"})], None, False),
        ([("pick", {"text": "x", "count": 10})], None, False),
        ([("pick", {"text": "x", "count": 1, "short": "abcd"})], None, False),
        ([("pick", {"text": "x", "colour": "green", "count": 1})], None, False),
        ([("pick", {"text": 5, "count": 1})], None, False),
        ([], None, False),
    ],
)
def test_what_formats_write_is_taken_if_the_schema_allows_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, family: str, calls: Any, max_calls: int | None, is_taken: bool
) -> None:
    dialect = FORMATS[family].dialect
    matcher = compiler.compile(of_grammar(calls_grammar(dialect, [PICK, NOTHING, ANYTHING], max_calls)))
    token_ids = tokenizer.encode(written(family, calls))
    assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) is is_taken


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_model_likes_it_makes_whole_calls(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    guide = Guide(compiler.compile(of_grammar(calls_grammar(V4_DIALECT, [PICK, NOTHING], None))), None)
    closing = tokenizer.encode("</｜DSML｜parameter>")
    blank = set(tokenizer.encode(" \t\r\n"))  # JSON would take it for ever
    token_ids: list[int] = []
    due: list[int] = []  # a model that wants nothing but chance would never close a text
    while not token_ids or token_ids[-1] != EOS_ID:
        words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
        assert guide.follow(token_ids, 0)
        assert guide.allow(words)
        allowed = [token for token in range(VOCAB_SIZE) if words[token // 32] >> (token % 32) & 1]
        allowed = [token for token in allowed if token not in blank] or allowed
        if not due and len(allowed) > 150 and rng.random() < 0.3:
            due = list(closing)
        token_ids.append(due.pop(0) if due else EOS_ID if EOS_ID in allowed else rng.choice(allowed))
        assert token_ids[-1] in allowed
        assert len(token_ids) < 3000, tokenizer.decode(token_ids[-500:])
    calls = read(talker(), tokenizer.decode(token_ids)).read_calls
    assert calls
    for name, arguments in calls:
        jsonschema.validate(arguments, {"pick": PICK, "nothing": NOTHING}[name]["parameters"])


STRICT = [PICK | {"strict": True}, NOTHING | {"strict": True}, ANYTHING]
GOOD = {"text": "</x>", "count": 1}


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize(
    ("before", "calls", "is_taken"),
    [
        ("", [], True),
        ("No tool.</think>It is 5 < 6 or </｜DSML｜ so", [], True),
        ("I ask.</think>Let us see.", [("pick", GOOD), ("nothing", {})], True),
        ("It opens within the thought.", [("pick", GOOD)], True),
        ("So.</think></think>", [("any.thing", {"a": "b", "c": [1]})], True),
        ("So.</think>", [("pick", {"text": "x", "count": 10})], False),
        ("So.", [("pick", {"text": "x"})], False),
        ("So.</think>", [("pick", GOOD | {"other": 1})], False),
        ("So.</think>", [("nothing", {"a": 1})], False),
        ("So.</think>", [("other", {})], False),
    ],
)
def test_a_whole_answer_is_free_but_for_the_calls_of_strict_functions(
    compiler: GrammarCompiler, tokenizer: Tokenizer, family: str, before: str, calls: Any, is_taken: bool
) -> None:
    matcher = compiler.compile(of_grammar(strict_grammar(FORMATS[family].dialect, STRICT, None)))
    token_ids = tokenizer.encode(before + (written(family, calls) if calls else ""))
    assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) is is_taken


def test_one_call_of_a_strict_function_where_calls_are_not_parallel(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = of_grammar(strict_grammar(V4_DIALECT, STRICT, 1))
    for num_calls, is_taken in ((1, True), (2, False)):
        token_ids = tokenizer.encode(written("v4", [("nothing", {})] * num_calls))
        assert (compiler.compile(grammar).try_consume_tokens(token_ids) == len(token_ids)) is is_taken


@pytest.mark.parametrize(
    "form",
    [of_json_schema({"const": 7}), of_regex("7"), of_choice(["7", "8"]), of_grammar('start: "7"')],
    ids=["schema", "regex", "choice", "grammar"],
)
def test_an_answer_of_a_form_or_calls(compiler: GrammarCompiler, tokenizer: Tokenizer, form: str) -> None:
    grammar = with_named(calls_or_form_grammar(V41_DIALECT, STRICT, None), FORM, form)
    good, bad = (written("v41", [("pick", arguments)]) for arguments in (GOOD, GOOD | {"count": 10}))
    cases = [("7", True), ("9", False), (good, True), (bad, False), ("7" + good, False)]
    for text, is_taken in cases:
        matcher, token_ids = compiler.compile(grammar), tokenizer.encode(text)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) is is_taken, text


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"type": "array"}, "must be an object"),
        ({"properties": {}, "anyOf": []}, "cannot have 'anyOf' at the top"),
        ({"properties": {}, "additionalProperties": {"type": "string"}}, "additionalProperties must be false"),
        ({"properties": {"a": {}}, "required": ["b"]}, "required names"),
        ({"properties": {"a": {}}, "required": [[]]}, "required names"),
        ({"properties": {'a"': {}}}, "no way to write"),
    ],
)
def test_a_schema_that_no_call_can_be_held_to_is_refused(parameters: Any, why: str) -> None:
    with pytest.raises(ChatError, match=why):
        check_strict({"name": "f", "parameters": parameters}, "tools[0].function", "tools")
    check_strict({"name": "f"}, "tools[0].function", "tools")


def test_a_text_with_limits_is_json(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"properties": {"short": {"type": "string", "maxLength": 3}}}
    grammar = of_grammar(calls_grammar(V4_DIALECT, [{"name": "f", "parameters": schema}], None))
    for value, is_taken in (('"abc"', True), ('"abcd"', False), ("abc", False)):
        text = written("v4", [("f", {"short": 0})]).replace(">0<", f">{value}<")
        token_ids = tokenizer.encode(text)
        assert (compiler.compile(grammar).try_consume_tokens(token_ids) == len(token_ids)) is is_taken


@pytest.mark.parametrize("schema", [{"properties": []}, {"properties": {"a": True}, "required": 3}, {"required": [[]]}])
def test_schemas_that_make_no_sense_raise_nothing_but_a_grammar_error(compiler: GrammarCompiler, schema: Any) -> None:
    with contextlib.suppress(GrammarError):
        compiler.compile(of_grammar(calls_grammar(V4_DIALECT, [{"name": "f", "parameters": schema}], None)))


def test_dialects_have_their_own_tags() -> None:
    assert "</｜DSML｜tool_calls>" in calls_grammar(V4_DIALECT, [NOTHING], None)
    assert "</｜DSML｜ calls>" in calls_grammar(V41_DIALECT, [NOTHING], None)
