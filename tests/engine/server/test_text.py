"""Tokens into text, and where a text ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.server.tokenize import Detokenizer, StopMatcher, Tokenizer


@given(st.text(max_size=40))
def test_pieces_of_any_text_join_to_the_text(text: str) -> None:
    tokenizer = _tokenizer()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokenizer.encode_plain(text)] + [detokenizer.finish()]
    assert "".join(pieces) == text


@given(st.lists(st.integers(16, 271), max_size=60))
def test_pieces_of_any_bytes_join_to_what_they_decode_to(token_ids: list[int]) -> None:
    tokenizer = _tokenizer()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in token_ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(token_ids)


def test_a_character_over_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token) for token in tokenizer.encode_plain("a€b")] == ["a", "", "", "€", "b"]


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    (first, *_) = tokenizer.encode_plain("€")
    assert (detokenizer.add(first), detokenizer.finish()) == ("", "\ufffd")


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        ((), ["a", "b"], "ab", False),
        (("b",), ["a", "b", "c"], "a", True),
        (("bc",), ["ab", "c"], "a", True),
        (("bc",), ["ab", "d"], "abd", False),
        (("bc",), ["ab"], "ab", False),
        (("xyz", "b"), ["axyb"], "axy", True),
        (("cd", "bc"), ["a", "b", "c", "d"], "a", True),
        (("aab",), ["a", "a", "a", "b"], "a", True),
    ],
)
def test_stop_strings(stops: tuple[str, ...], pieces: list[str], shown: str, stopped: bool) -> None:
    matcher = StopMatcher(stops)
    text = "".join([matcher.add(piece) for piece in pieces])
    if not matcher.is_stopped:
        text += matcher.finish()
    assert (text, matcher.is_stopped) == (shown, stopped)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.randoms())
def test_stopping_does_not_depend_on_the_pieces(text: str, stops: list[str], rng: random.Random) -> None:
    matcher = StopMatcher(stops)
    shown, rest = "", text
    while rest and not matcher.is_stopped:
        length = rng.randint(1, len(rest))
        shown += matcher.add(rest[:length])
        assert text.startswith(shown), "what was shown is never taken back"
        rest = rest[length:]
    if not matcher.is_stopped:
        shown += matcher.finish()
    # The stop string that is complete first ends the text, at its own beginning.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert shown == text
    else:
        assert not any(stop in shown for stop in stops)
        assert len(shown) <= min(end for end, _ in ends)


_cached: list[Tokenizer] = []


def _tokenizer() -> Tokenizer:
    """Outside fixtures, as hypothesis wants no function-scoped ones."""
    if not _cached:
        import tempfile
        from pathlib import Path

        from headrace_engine.models.deepseek_v4.tiny_tokenizer import write_tokenizer

        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder), 4096)
            _cached.append(Tokenizer(Path(folder)))
    return _cached[0]
