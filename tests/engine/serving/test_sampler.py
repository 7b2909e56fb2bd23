"""Which token a row of logits becomes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from headrace_engine.core import SamplingParams
from headrace_engine.sampler import NOT_FINITE, Draw, sample, uniform


def draw_many(logits: list[float], params: SamplingParams, n: int = 1500) -> list[float]:
    """Frequencies of each token over n positions."""
    rows = torch.tensor(logits).repeat(n, 1)
    tokens = sample(rows, [Draw(params, position) for position in range(n)])
    return [tokens.count(i) / n for i in range(len(logits))]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [Draw(SamplingParams(temperature=0), 0)] * 2) == [1, 0]


def test_frequencies_follow_the_softmax() -> None:
    frequencies = draw_many([0.0, 1.0, 2.0], SamplingParams(seed=3))
    expected = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), 0).tolist()
    assert frequencies == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=1), {3}),
        (SamplingParams(top_k=2), {3, 2}),
        (SamplingParams(top_p=0.5), {3}),
        (SamplingParams(top_p=0.7), {3, 2}),
        (SamplingParams(top_p=1e-9), {3}),
        (SamplingParams(top_k=3, top_p=0.99), {3, 2, 1}),
        (SamplingParams(temperature=1e-6), {3}),
    ],
)
def test_truncation_keeps_only_the_likeliest(params: SamplingParams, allowed: set[int]) -> None:
    frequencies = draw_many([0.0, 1.0, 2.0, 3.0], params)
    assert {i for i, f in enumerate(frequencies) if f} == allowed


@given(
    logits=st.lists(st.integers(-60, 60), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.35, 0.62, 0.93, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_draw_is_that_of_the_distribution_that_transformers_makes(
    logits: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    """Temperature, then top-k, then top-p of what is left, then the inverse of the cumulative distribution."""
    scores = torch.tensor([logits], dtype=torch.float64) / 10 / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(torch.zeros(1, 1), scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(torch.zeros(1, 1), scores)
    expected = torch.softmax(scores[0], 0).tolist()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=5)
    rows = (torch.tensor(logits) / 10).repeat(400, 1)
    tokens = sample(rows, [Draw(params, position) for position in range(400)])
    assert set(tokens) <= {i for i, p in enumerate(expected) if p}
    # The same 400 uniform numbers, placed on the reference's distribution: largest first where it was truncated.
    order = sorted(range(len(logits)), key=lambda i: -expected[i]) if top_k or top_p < 1 else range(len(logits))
    ends = dict(zip(order, itertools.accumulate(expected[i] for i in order), strict=True))
    for position, token in enumerate(tokens):
        number = uniform(5, position)
        assert ends[token] - expected[token] - 1e-5 <= number <= ends[token] + 1e-5


def test_top_p_over_more_candidates_than_are_sorted_first() -> None:
    """A flat distribution over 5,000 tokens: half of the mass is half of the tokens."""
    logits = torch.linspace(0.001, 0, 5000).repeat(300, 1)
    tokens = sample(logits, [Draw(SamplingParams(top_p=0.5, seed=1), i) for i in range(300)])
    assert max(tokens) < 2600
    assert max(tokens) > 2000


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    draws = [Draw(SamplingParams(seed=i % 3), 10 + i) for i in range(8)]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(8)]
    assert together == alone


def test_other_seed_or_position_other_number() -> None:
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_no_token(bad: float) -> None:
    logits = torch.tensor([[1.0, bad], [0.0, 1.0]])
    assert sample(logits, [Draw(SamplingParams(temperature=0), 0)] * 2) == [NOT_FINITE, 1]
