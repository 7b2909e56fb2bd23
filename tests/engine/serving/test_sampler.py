"""Which token a row of logits becomes."""

from __future__ import annotations

import pytest
import torch

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
