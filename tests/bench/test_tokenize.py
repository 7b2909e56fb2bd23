"""The benchmark of tokenizing, on a session small enough for a test."""

from __future__ import annotations

from pathlib import Path

from tests.bench.tokenize import FORMATS, library_texts, make_session, measure, take
from tests.engine.chat.vocabulary import write_vocabulary

from headrace_engine.server.tokenize import Tokenizer


def test_a_turn_is_measured_after_the_one_before_it(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, [take(library_texts(0), 2_000)], 300)
    tools, messages = make_session(num_turns=3, num_tokens=1000, seed=1, opening_tokens=800)
    assert (tools, messages) == make_session(num_turns=3, num_tokens=1000, seed=1, opening_tokens=800)
    for chat_format in FORMATS.values():
        turn = measure(Tokenizer(tmp_path), chat_format, tools, messages, turn=3, repetitions=1)
        assert 0 < turn.num_new_chars < turn.num_chars / 5
        assert turn.num_tokens > 0
        assert min(turn.whole_ms, turn.incremental_ms, turn.render_ms) > 0
