"""Answers that follow a grammar: what may come next, when it begins, and what happens to a grammar that cannot be."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_engine.core import GRAMMAR_FAILED, EngineRequest, Leg, RequestError, SamplingParams
from headrace_engine.grammars import COMPILE_SECONDS, PendingGrammars
from headrace_engine.models.deepseek_v4.tiny_tokenizer import VOCAB_SIZE, byte_token_ids, write_tokenizer
from headrace_engine.sampling import grammar
from headrace_engine.sampling.grammar import GrammarCompiler, GrammarError, Guide
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sequence import Sequence

EOS = 1
BYTES = byte_token_ids()
PROMPT = [BYTES[ord("?")]]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 4096)
    return GrammarCompiler(folder / "tokenizer.json", VOCAB_SIZE, [EOS])


def ids(text: str) -> list[int]:
    return [BYTES[byte] for byte in text.encode()]


def guided(compiler: GrammarCompiler, text: str, starts_after: int | None = None, **sampling: Any) -> Sequence:
    params = SamplingParams(temperature=0, grammar=text, grammar_after=starts_after, **sampling)
    guide = Guide(compiler.compile(text), starts_after)
    return Sequence.of(EngineRequest("r", Leg.WHOLE, PROMPT, params), 0, guide)


def write(sequence: Sequence, wishes: str, max_tokens: int = 60) -> str:
    """The answer of a model that always wishes for the next character of `wishes`, and else for the first token."""
    sampler = Sampler([EOS])
    wanted = iter(ids(wishes))
    written = bytearray()
    for _ in range(max_tokens):
        logits = torch.linspace(1, 0, VOCAB_SIZE)[None].clone()
        logits[0, next(wanted, EOS)] = 5
        (token,), _ = sampler.sample(logits, [sequence])
        sequence.token_ids.append(token)
        if token == EOS:
            return written.decode()
        written.append(next(byte for byte, token_id in BYTES.items() if token_id == token))
    raise AssertionError(f"no end: {written!r}")


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "wishes", "written"),
    [
        (grammar.of_choice(["yes", "no"]), "no", "no"),
        (grammar.of_choice(["yes", "no"]), "n?", "no"),
        (grammar.of_choice(['a "quoted" one']), "?", 'a "quoted" one'),
        (grammar.of_regex("[0-9]{2}-[a-f]+"), "12-ace", "12-ace"),
        (grammar.of_regex("[0-9]{2}-[a-f]+"), "1x-a", "10-a"),
        (grammar.of_grammar('start: "(" start ")" | "x"'), "((x?", "((x))"),
        (grammar.of_grammar('root ::= "a" | "b" root'), "bba", "bba"),
        (grammar.of_json_schema(PERSON), '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}'),
        (grammar.of_json_schema(PERSON, allows_whitespace=False), '{ "name":"', '{"name":"","age":-0}'),
    ],
)
def test_an_answer_follows_its_grammar_and_ends_where_it_may(
    compiler: GrammarCompiler, text: str, wishes: str, written: str
) -> None:
    made = write(guided(compiler, text), wishes)
    assert made == written


def test_a_grammar_begins_behind_the_thought(compiler: GrammarCompiler) -> None:
    end = BYTES[ord("|")]
    sequence = guided(compiler, grammar.of_choice(["yes", "no"]), end)
    assert write(sequence, "let me see|no way") == "let me see|no"


def test_rows_without_a_grammar_keep_their_tokens(compiler: GrammarCompiler) -> None:
    plain = Sequence.of(EngineRequest("p", Leg.WHOLE, PROMPT, SamplingParams(temperature=0)), 0)
    bound = guided(compiler, grammar.of_regex("a"))
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 77] = 1
    assert Sampler([EOS]).sample(logits, [plain, bound, plain])[0] == [77, BYTES[ord("a")], 77]


def test_tokens_that_do_not_follow_fail_that_row_alone(compiler: GrammarCompiler) -> None:
    lost, bound = guided(compiler, grammar.of_regex("a")), guided(compiler, grammar.of_regex("b"))
    lost.token_ids += ids("z")
    assert Sampler([EOS]).sample(torch.zeros(2, VOCAB_SIZE), [lost, bound])[0] == [GRAMMAR_FAILED, BYTES[ord("b")]]


@pytest.mark.parametrize(
    "text",
    [
        grammar.of_json_schema({"type": "wizard"}),
        grammar.of_regex("[a-"),
        grammar.of_regex(r"(a)\1"),
        grammar.of_grammar("start: nothing"),
        "{}",
        "not JSON",
    ],
)
def test_a_grammar_that_cannot_be_has_a_reason(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(GrammarError, match=r"\w"):
        compiler.compile(text)


def request(name: str, text: str) -> EngineRequest:
    return EngineRequest(name, Leg.WHOLE, PROMPT, SamplingParams(grammar=text))


def test_compiling_ends_the_ranks_wait(compiler: GrammarCompiler) -> None:
    woken = threading.Event()
    pending = PendingGrammars(compiler, woken.set)
    try:
        pending.add(request("good", grammar.of_regex("a")), 0)
        assert not pending.is_empty
        assert woken.wait(20)
        ((done, guide),) = pending.poll(0)
        assert (done.request_id, type(guide)) == ("good", Guide)
        assert pending.is_empty
        woken.clear()
        pending.add(request("bad", grammar.of_regex("(")), 0)
        assert woken.wait(20)
        ((done, error),) = pending.poll(0)
        assert isinstance(error, RequestError)
        assert (done.request_id, error.status) == ("bad", 400)
    finally:
        pending.close()


class Slow(GrammarCompiler):
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def compile(self, text: str) -> Any:
        assert self.may_end.wait(20)
        raise GrammarError("late")


def test_a_grammar_that_takes_too_long_and_one_that_is_aborted() -> None:
    slow = Slow()
    pending = PendingGrammars(slow, lambda: None)
    try:
        pending.add(request("late", "x"), 0)
        pending.add(request("left", "x"), 0)
        assert pending.poll(COMPILE_SECONDS - 1) == []
        assert pending.abort("left")
        assert not pending.abort("left")
        ((done, error),) = pending.poll(COMPILE_SECONDS)
        assert isinstance(error, RequestError)
        assert (done.request_id, error.status, error.retriable) == ("late", 503, True)
        assert pending.is_empty
    finally:
        slow.may_end.set()
        pending.close()
