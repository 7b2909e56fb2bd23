"""What a request asks to be done to its logits, over the tokens that it has so far."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from headrace_engine.core import EngineRequest, Leg, SamplingParams
from headrace_engine.sampling.adjust import force, penalize
from headrace_engine.sampling.counts import TokenCounts
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sequence import Sequence

EOS = 0
tokens = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def sequence(prompt: list[int], answer: list[int] = [], **sampling: object) -> Sequence:  # noqa: B006
    made = Sequence.of(EngineRequest("r", Leg.WHOLE, prompt, SamplingParams(temperature=0, **sampling)), 0)  # type: ignore[arg-type]
    made.token_ids += answer
    return made


@pytest.mark.parametrize(
    ("sampling", "answer", "expected"),
    [
        ({}, [], 0),
        ({"logit_bias": ((2, 3.5),)}, [], 2),
        ({"logit_bias": ((0, -100.0), (3, -100.0))}, [], 1),
        ({"min_tokens": 1}, [], 3),
        ({"min_tokens": 2}, [3], 3),
        ({"min_tokens": 2}, [3, 3], 0),
        ({"min_tokens": 1, "stop_token_ids": (3,)}, [], 1),
        ({"presence_penalty": 1.5}, [0], 3),
        ({"presence_penalty": 1.5}, [0, 3, 0], 0),
        ({"frequency_penalty": 0.6}, [0, 0], 3),
        ({"repetition_penalty": 2.0}, [0], 3),
        ({"presence_penalty": -2.0}, [1], 1),
        ({"max_thought_tokens": 2, "thought_ends": (2, 1)}, [3], 0),
        ({"max_thought_tokens": 2, "thought_ends": (2, 1)}, [3, 3], 2),
        ({"max_thought_tokens": 2, "thought_ends": (2, 1)}, [3, 1], 0),
        ({"max_thought_tokens": 2, "thought_ends": (2, 1)}, [3, 3, 3], 0),
        ({"max_thought_tokens": 0, "thought_ends": (2,)}, [], 2),
    ],
)
def test_an_adjustment_changes_the_choice(sampling: dict[str, object], answer: list[int], expected: int) -> None:
    """Of logits 4, 2.5, 1, 3; the neighbours, who ask for nothing, keep their token."""
    logits = torch.tensor([[4.0, 2.5, 1.0, 3.0]]).repeat(3, 1)
    chosen, _ = Sampler([EOS]).sample(logits, [sequence([1]), sequence([2], answer, **sampling), sequence([1])])
    assert chosen == [0, expected, 0]


def test_a_token_that_a_grammar_forbids_is_not_forced() -> None:
    logits = torch.tensor([[4.0, -torch.inf, 1.0], [4.0, 2.0, 1.0]])
    force(logits, [(0, 1), (1, 1)])
    assert logits.argmax(-1).tolist() == [0, 1]


def test_presence_and_frequency_count_the_answer_and_repetition_the_prompt_too() -> None:
    logits = torch.tensor([[4.0, 2.5, 1.0, 3.0]]).repeat(3, 1)
    prompt = [0, 0, 0]
    asked = ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0})
    chosen, _ = Sampler([EOS]).sample(logits, [sequence(prompt, **fields) for fields in asked])
    assert chosen == [0, 0, 3]


@given(rows=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_penalties_are_those_of_their_definitions(rows: list[tuple[list[int], list[int]]], seed: int) -> None:
    """Repetition as transformers has it; frequency and presence as OpenAI's reference writes them, token by token."""
    logits = torch.randn(len(rows), 10, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4)
    expected = logits.clone()
    for row, (prompt, answer) in enumerate(rows):
        ids = torch.tensor([prompt + answer])
        expected[row] = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[row : row + 1].clone())[0]
        for token in range(10):
            count = answer.count(token)
            expected[row, token] -= count * 0.7 + float(count > 0) * -0.4
    counts = [TokenCounts(prompt) for prompt, _ in rows]
    for count, (prompt, answer) in zip(counts, rows, strict=True):
        count.update(prompt + answer[:2])
        count.update(prompt + answer)
    penalize(logits, [(row, params, count) for row, count in enumerate(counts)])
    assert torch.allclose(logits, expected, atol=1e-6)


def test_counts_grow_with_the_answer_beyond_their_first_room() -> None:
    counts = TokenCounts([5, 5, 7])
    answer = [*range(200), 5]
    counts.update([5, 5, 7, *answer])
    assert dict(zip(counts.token_ids.tolist(), counts.num_generated.tolist(), strict=True)) == {
        token: float(answer.count(token)) for token in range(200)
    }


def test_what_is_kept_for_a_sequence_ends_with_it() -> None:
    sampler = Sampler([EOS])
    penalized = sequence([1], presence_penalty=1.0)
    sampler.sample(torch.zeros(1, 4), [penalized])
    assert len(sampler._counts) == 1
    del penalized
    gc.collect()
    assert len(sampler._counts) == 0
