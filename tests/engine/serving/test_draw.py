"""Which token a row of logits becomes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace_engine.core import SamplingParams
from headrace_engine.sampling.draw import NOT_FINITE, Draw, choose, uniform


def draw_many(logits: list[float], params: SamplingParams, n: int = 1500) -> list[float]:
    """Frequencies of each token over n positions."""
    rows = torch.tensor(logits).repeat(n, 1)
    tokens = choose(rows, [Draw(params, position) for position in range(n)])
    return [tokens.count(i) / n for i in range(len(logits))]


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert choose(logits, [Draw(SamplingParams(temperature=0), 0)] * 2) == [1, 0]


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
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
)
@settings(max_examples=60, deadline=None)
def test_the_draw_is_that_of_the_distribution_that_transformers_makes(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Temperature, min-p, top-k, then top-p of what is left, then the inverse of the cumulative distribution."""
    scores = torch.tensor([logits], dtype=torch.float64) / 10 / temperature
    if min_p:
        scores = MinPLogitsWarper(min_p)(torch.zeros(1, 1), scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(torch.zeros(1, 1), scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(torch.zeros(1, 1), scores)
    expected = torch.softmax(scores[0], 0).tolist()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=5)
    rows = (torch.tensor(logits) / 10).repeat(400, 1)
    tokens = choose(rows, [Draw(params, position) for position in range(400)])
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
    tokens = choose(logits, [Draw(SamplingParams(top_p=0.5, seed=1), i) for i in range(300)])
    assert max(tokens) < 2600
    assert max(tokens) > 2000


KINDS = (
    SamplingParams(seed=1),
    SamplingParams(temperature=0),
    SamplingParams(seed=2, top_k=5),
    SamplingParams(seed=3, top_k=40, top_p=0.7),
    SamplingParams(seed=4, top_p=0.9),
    SamplingParams(seed=5, min_p=0.05, temperature=3.0),
    SamplingParams(seed=6, top_p=0.99, temperature=50.0),  # more candidates than are sorted first
)


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=8), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(kinds: list[SamplingParams], seed: int) -> None:
    """Also where logits are equal, as those of bf16 models often are."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-20, 20, (len(kinds), 3000), generator=generator) / 4
    draws = [Draw(params, 10 + i) for i, params in enumerate(kinds)]
    alone = [choose(logits[i : i + 1], [draws[i]])[0] for i in range(len(kinds))]
    assert choose(logits, draws) == alone


def test_other_seed_or_position_other_number() -> None:
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_no_token(bad: float) -> None:
    logits = torch.tensor([[1.0, bad], [0.0, 1.0]])
    assert choose(logits, [Draw(SamplingParams(temperature=0), 0)] * 2) == [NOT_FINITE, 1]


def test_a_token_that_is_ruled_out_is_never_drawn_not_even_by_rounding() -> None:
    logits = torch.full((4000, 6), -torch.inf)
    logits[:, 2:4] = torch.tensor([0.0, -30.0])
    assert set(choose(logits, [Draw(SamplingParams(seed=1), i) for i in range(4000)])) == {2}
