"""Grammars that answers must follow: the only file that knows llguidance.

A grammar is llguidance's own text form (made of a JSON schema, a regular expression, ... by the server). Compiling is
bounded by LIMITS in work and memory, and so is every step; what goes beyond them fails with a reason.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

# Worst cases of about 50 ms to compile and 15 ms for one step's mask, by llguidance's own figures; typical ones are
# a hundredth of that.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """The grammar cannot be used; the message is for whoever wrote it."""


def of_json_schema(
    schema: dict[str, Any] | str, *, whitespace_pattern: str | None = None, allows_whitespace: bool = True
) -> str:
    """The grammar of a JSON value. whitespace_pattern: a regex, None: any amount of it. Raises ValueError."""
    options: dict[str, Any] = {}
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    if not allows_whitespace:
        options["whitespace_flexible"] = False
    try:
        made: str = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(str(error)) from None
    return made


def of_regex(pattern: str) -> str:
    """The grammar of texts that match as a whole (Rust's regex syntax: no look-around, no back references)."""
    return str(LLMatcher.grammar_from_regex(pattern))


def of_choice(choices: Sequence[str]) -> str:
    """The grammar of one of these texts."""
    return str(grammar_from("choice", json.dumps(list(choices))))


def of_grammar(text: str) -> str:
    """A context-free grammar in Lark's or GBNF's notation. Raises ValueError."""
    return str(grammar_from("grammar", text))


def with_named(text: str, name: str, named: str) -> str:
    """The grammar `text` in Lark's notation, which refers to another one, of any kind, as @name."""
    made = json.loads(named)["grammars"] if named.startswith("{") else [{"lark_grammar": named}]
    return json.dumps({"grammars": [{"lark_grammar": text}, {**made[0], "name": name}]})


class GrammarCompiler:
    """One model's. Every method may be called from any thread. eos_token_ids: () where nothing will be generated."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of the grammar. Raises GrammarError."""
        matcher = LLMatcher(self._prepared(), grammar, limits=LIMITS, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error()[:1000])
        return matcher

    def _prepared(self) -> LLTokenizer:
        """The vocabulary as a prefix tree: seconds for a large one, so it is made when the first grammar comes."""
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        str(self._tokenizer_file), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
                    )
                except Exception as error:  # the library raises what its parser raises
                    raise GrammarError(f"this model's tokenizer does not allow grammars: {error}") from error
            return self._tokenizer


class Guide:
    """One answer's place in its grammar. starts_after: the token up to which the answer is free (a closed thought)."""

    def __init__(self, matcher: LLMatcher, starts_after: int | None) -> None:
        self._matcher = matcher
        self._starts_after = starts_after
        self._num_seen = 0

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Take what the answer (behind the prompt) has gained. False while it is free."""
        answer = token_ids[num_prompt_tokens + self._num_seen :]
        self._num_seen += len(answer)
        if self._starts_after is not None:
            if self._starts_after not in answer:
                return False
            answer = answer[answer.index(self._starts_after) + 1 :]
            self._starts_after = None
        self._matcher.consume_tokens(list(answer))
        return True

    def allow(self, words: np.ndarray) -> bool:
        """Set bit i of the int32 words where token i may come next. False if none may."""
        if self._matcher.is_error():
            return False
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return not self._matcher.is_error()
