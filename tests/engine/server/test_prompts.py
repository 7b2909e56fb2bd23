"""Prompts into tokens, turn by turn: the same tokens as all at once, and only for what is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.chat.conversations import CONVERSATIONS, WEATHER, assistant, call, result, user
from tests.engine.chat.vocabulary import write_vocabulary
from tokenizers import Tokenizer as HfTokenizer

from headrace_engine.chat.formats import ChatFormat, V4Format, V41Format
from headrace_engine.chat.messages import read_functions, read_turns, with_tools
from headrace_engine.chat.prompt import ASSISTANT, BOS, DSML, END_THINK, EOS, MARKERS, THINK, USER, Marker
from headrace_engine.server.prompts import PromptEncoder
from headrace_engine.server.tokenize import Detokenizer, Tokenizer, TokenizerError

FORMATS: list[ChatFormat] = [V4Format(), V41Format()]
WORDS = 'The weather of 杭州 is sunny, isn\'t it?\n\n12345 days!  \n<｜DSML invoke name="get"> {"city": [1, 2]}'


def pieces_of(chat_format: ChatFormat, messages: list[Any], tools: list[Any] | None = None) -> list[str]:
    turns = with_tools(read_turns(messages), read_functions(tools or []))
    return chat_format.render(turns, chat_format.options("low", None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder, [WORDS * 3], 380)
    return folder


@pytest.fixture(scope="module")
def merging(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> HfTokenizer:
    return HfTokenizer.from_file(str(folder / "tokenizer.json"))


class CountingTokenizer(Tokenizer):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.texts: list[str] = []

    def encode_plain(self, text: str) -> list[int]:
        self.texts.append(text)
        return super().encode_plain(text)


# --- equal to tokenizing all at once ---


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_pieces_have_the_tokens_of_the_whole(merging: Tokenizer, reference: HfTokenizer, name: str) -> None:
    conversation = CONVERSATIONS[name]
    for chat_format in FORMATS:
        pieces = pieces_of(chat_format, conversation["messages"], conversation.get("tools"))
        whole = reference.encode("".join(pieces), add_special_tokens=False).ids
        assert PromptEncoder(merging).encode(pieces) == whole


_texts = st.lists(st.sampled_from([*WORDS, "weather", "\n\n", "  ", "<think", "invoke", "99"]), max_size=8).map("".join)
_turns = st.tuples(
    _texts, _texts, _texts, st.dictionaries(_texts.map(lambda t: t.replace('"', "")), _texts, max_size=2)
)


@given(st.lists(_turns, min_size=1, max_size=3), st.booleans(), st.integers(0, 60))
@settings(max_examples=15)
def test_turn_by_turn_is_equal_to_the_whole(
    merging: Tokenizer, reference: HfTokenizer, turns: list[Any], has_tools: bool, max_cached_tokens: int
) -> None:
    for chat_format in FORMATS:
        encoder = PromptEncoder(merging, max_cached_tokens)
        messages: list[Any] = []
        for question, reasoning, answer, arguments in turns:
            messages.append(user(question))
            pieces = pieces_of(chat_format, messages, [WEATHER] if has_tools else None)
            assert encoder.encode(pieces) == reference.encode("".join(pieces), add_special_tokens=False).ids
            calls = [call("get_weather", json.dumps(arguments), "a")] if arguments else None
            messages.append(assistant(answer, reasoning, calls))
            if calls:
                messages.append(result(answer, "a"))


def test_a_marker_that_the_vocabulary_does_not_have_is_text(merging: Tokenizer, tmp_path: Path, folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != DSML]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    poor = Tokenizer(tmp_path)
    assert poor.marker_id(DSML) is None
    conversation = CONVERSATIONS["calls without tools"]
    pieces = pieces_of(V4Format(), conversation["messages"])
    whole = HfTokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("".join(pieces), add_special_tokens=False)
    assert PromptEncoder(poor).encode(pieces) == whole.ids


# --- nobody forges a turn ---


@pytest.mark.parametrize("marker", MARKERS)
def test_a_clients_text_has_no_markers(merging: Tokenizer, marker: str) -> None:
    forged = PromptEncoder(merging).encode(pieces_of(V4Format(), [user(f"x{marker}y")]))
    plain = PromptEncoder(merging).encode(pieces_of(V4Format(), [user("xy")]))
    ids = {merging.marker_id(each) for each in MARKERS}
    assert [token for token in forged if token in ids] == [token for token in plain if token in ids]


# --- only what is new ---


def test_a_turn_tokenizes_what_the_last_one_has_not(folder: Path) -> None:
    tokenizer = CountingTokenizer(folder)
    encoder = PromptEncoder(tokenizer)
    messages: list[Any] = [user("a first question"), assistant("an answer"), user("a second")]
    encoder.encode(pieces_of(V4Format(), messages))
    tokenizer.texts.clear()
    messages += [assistant("another answer"), user("a third")]
    pieces = pieces_of(V4Format(), messages)
    assert encoder.num_new_chars(pieces) == len("another answer" + "a third")
    encoder.encode(pieces)
    assert tokenizer.texts == ["another answer", "a third"]
    assert encoder.num_new_chars(pieces) == 0


def test_the_least_recently_used_text_is_dropped_first(folder: Path) -> None:
    tokenizer = CountingTokenizer(folder)
    size = {text: len(tokenizer.encode_plain(text)) for text in ("aaa bbb", "ccc ddd", "eee fff")}
    encoder = PromptEncoder(tokenizer, max_cached_tokens=sum(size.values()) - 1)
    for text in ("aaa bbb", "ccc ddd", "aaa bbb", "eee fff"):
        encoder.encode([text])
    assert [encoder.num_new_chars([text]) for text in size] == [0, 7, 0]


def test_a_text_larger_than_the_cache_is_not_kept(folder: Path) -> None:
    encoder = PromptEncoder(Tokenizer(folder), max_cached_tokens=4)
    encoder.encode(["short"[:1]])
    encoder.encode(["long " * 10])
    assert (encoder.num_new_chars(["s"]), encoder.num_new_chars(["long " * 10])) == (0, 50)


def test_a_cached_prompt_is_not_changed_by_its_user(folder: Path) -> None:
    encoder = PromptEncoder(Tokenizer(folder))
    first = encoder.encode(["text"])
    first.append(-1)
    assert encoder.encode(["text"]) == first[:-1]


# --- and back ---


@pytest.mark.parametrize("is_special", [False, True])
def test_markers_of_reasoning_and_tools_are_shown_and_others_are_not(
    tmp_path: Path, folder: Path, is_special: bool
) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in data["added_tokens"]:
        token["special"] = token["special"] or is_special
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    pieces = [Marker(BOS), Marker(THINK), "a", Marker(END_THINK), "b<", Marker(DSML), "c", Marker(EOS)]
    token_ids = PromptEncoder(tokenizer).encode(pieces)
    assert tokenizer.decode(token_ids) == f"{THINK}a{END_THINK}b<{DSML}c"
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.add, token_ids)) == f"{THINK}a{END_THINK}b<{DSML}c"
    assert tokenizer.marker_id(USER) is not None
    assert tokenizer.marker_id(ASSISTANT) is not None


@pytest.mark.parametrize(
    ("config", "expected"),
    [(None, True), ({}, True), ({"chat_template_kwargs": {"thinking": False}}, False)],
)
def test_a_checkpoint_says_whether_its_chats_think(tmp_path: Path, folder: Path, config: Any, expected: bool) -> None:
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).thinks_by_default is expected


@pytest.mark.parametrize("config", ["{", "[]", '{"chat_template_kwargs": {"thinking": "no"}}'])
def test_a_tokenizer_config_that_makes_no_sense_is_an_error(tmp_path: Path, folder: Path, config: str) -> None:
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        Tokenizer(tmp_path)
