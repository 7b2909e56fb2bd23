"""Log-probabilities: what the model itself thought, whatever was asked to be done to its logits."""

from __future__ import annotations

import pytest
import torch
from tests.engine.serving.test_runner import Engine

from headrace_engine.core import EngineRequest, Leg, SamplingParams, TokenScore
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sampling.scores import score
from headrace_engine.sequence import MAX_SCORED_PER_STEP, Generated, Sequence


def test_scores_are_those_of_the_softmax() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    logprobs = torch.log_softmax(logits.double(), -1)
    for row, made in enumerate(score(logits, [5, 0, 19], 4)):
        order = sorted(range(20), key=lambda token: -float(logprobs[row, token]))
        assert made.logprob == pytest.approx(float(logprobs[row, made.token_id]), abs=1e-5)
        assert made.rank == order.index(made.token_id) + 1
        assert [token for token, _ in made.top] == order[:4]
        assert [value for _, value in made.top] == pytest.approx([float(logprobs[row, t]) for t in order[:4]], abs=1e-5)


def test_scores_come_for_those_who_ask_and_are_of_the_logits_before_any_bias() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.5]]).repeat(4, 1)
    expected = torch.log_softmax(logits[0], -1).tolist()
    asked: list[SamplingParams] = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, num_logprobs=0, logit_bias=((0, 50.0),)),
        SamplingParams(temperature=0, num_logprobs=2, min_tokens=1),
        SamplingParams(temperature=0, num_logprobs=1),
    ]
    sequences = [Sequence.of(EngineRequest("r", Leg.WHOLE, [1], params), 0) for params in asked]
    tokens, scores = Sampler([1]).sample(logits, sequences)
    assert tokens == [1, 0, 3, 1]
    assert set(scores) == {1, 2, 3}
    assert (scores[1].token_id, scores[1].rank, scores[1].top) == (0, 4, ())
    assert scores[1].logprob == pytest.approx(expected[0])
    assert (scores[2].token_id, scores[2].rank, [t for t, _ in scores[2].top]) == (3, 2, [1, 3])
    assert scores[3].top == ((1, pytest.approx(expected[1])),)


class ScoredEngine(Engine):
    """Keeps the scores of each request as well."""

    def __init__(self, num_blocks: int, max_batch_tokens: int) -> None:
        super().__init__(num_blocks, max_batch_tokens)
        self.scores: dict[str, tuple[TokenScore, ...]] = {}
        self.num_prompt_scores: list[int] = []

    def ask(self, name: str, prompt: list[int], max_tokens: int, **sampling: int) -> None:
        self.tokens[name] = []
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        self.scheduler.add(EngineRequest(name, Leg.WHOLE, prompt, params), 0)

    def step(self) -> None:
        step = self.scheduler.schedule(0)
        self.num_prompt_scores.append(sum(len(row.scored) for row in step.rows))
        self.runner.copy_slots(step.slot_copies)
        self.runner.copy_slots(self.scheduler.commit(step, self.runner.run(step.rows)))
        for action in self.scheduler.take_actions():
            assert isinstance(action, Generated)
            self.tokens[action.request_id].append(action.token_id)
            self.num_cached[action.request_id] = action.num_cached_tokens
            self.scores.setdefault(action.request_id, action.prompt_scores)


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 64])
def test_every_prompt_token_but_the_first_is_scored_however_prompts_are_cut_and_cached(max_batch_tokens: int) -> None:
    engine = ScoredEngine(64, max_batch_tokens)
    prompt = [30 + i for i in range(14)]
    for name in ("a", "b"):
        engine.ask(name, prompt, 2, num_prompt_logprobs=1)
        engine.ask(name + " plain", prompt, 2)
        engine.finish()
        scores = engine.scores[name]
        assert [made.token_id for made in scores] == prompt[1:]
        # The toy gives the token that follows the largest logit, from every token before it.
        for position, made in enumerate(scores):
            likeliest = ScoredEngine(64, 64)
            likeliest.ask("x", prompt[: position + 1], 1)
            likeliest.finish()
            assert made.top[0][0] == likeliest.tokens["x"][0]
    assert engine.num_cached["b"] == 0, "a cached prefix has no logits"
    assert engine.num_cached["b plain"] == 12
    assert engine.tokens["a"] == engine.tokens["b plain"]


def test_a_step_scores_no_more_prompt_tokens_than_its_bound() -> None:
    engine = ScoredEngine(200, 4 * MAX_SCORED_PER_STEP)
    for name in ("a", "b", "c"):
        engine.ask(name, [20 + i for i in range(60)], 1, num_prompt_logprobs=0)
    engine.finish()
    assert max(engine.num_prompt_scores) <= MAX_SCORED_PER_STEP
    assert all(len(engine.scores[name]) == 59 for name in ("a", "b", "c"))
