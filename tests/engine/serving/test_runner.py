"""Scheduler and runner together over the toy model: every token is right, whatever is cached, cut or preempted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.serving.toy import EOS, ToyModel, expected

from headrace_engine.core import EngineRequest, Leg, SamplingParams
from headrace_engine.ep.local import LocalExchange
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.layout import allocate_cache
from headrace_engine.runner import Runner
from headrace_engine.scheduler import Scheduler, SchedulerLimits
from headrace_engine.sequence import Generated

BLOCK = 4
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Engine:
    """A rank without processes, sockets or time."""

    def __init__(self, num_blocks: int, max_batch_tokens: int, max_sequences: int = 4) -> None:
        model = ToyModel(BLOCK)
        num_slots = 2 * max_sequences
        pool = BlockPool(num_blocks, num_slots, BLOCK)
        limits = SchedulerLimits(max_batch_tokens, max_batch_tokens, max_sequences, 100, 64, frozenset({EOS}))
        self.scheduler = Scheduler(limits, pool, has_snapshots=True)
        self.runner = Runner(
            model,
            allocate_cache(model.cache_groups, BLOCK, num_blocks, num_slots),
            LocalExchange(),
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            max_blocks=16,
            num_slots=num_slots,
        )
        self.tokens: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.tokens[name] = []
        self.scheduler.add(EngineRequest(name, Leg.WHOLE, prompt, SamplingParams(max_tokens, **GREEDY)), 0)

    def step(self) -> None:
        step = self.scheduler.schedule(0)
        self.runner.copy_slots(step.slot_copies)
        self.runner.copy_slots(self.scheduler.commit(step, self.runner.run(step.rows)))
        for action in self.scheduler.take_actions():
            assert isinstance(action, Generated)
            self.tokens[action.request_id].append(action.token_id)
            self.num_cached[action.request_id] = action.num_cached_tokens

    def finish(self) -> None:
        for _ in range(10_000):
            if self.scheduler.is_empty:
                return
            self.step()
        raise AssertionError("no end")


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 5, 64])
def test_tokens_do_not_depend_on_how_prompts_are_cut(max_batch_tokens: int) -> None:
    engine = Engine(64, max_batch_tokens)
    for length in (1, 3, 4, 5, 17):
        prompt = [20 + length + i for i in range(length)]
        engine.add(str(length), prompt, 6)
    engine.finish()
    for length in (1, 3, 4, 5, 17):
        assert engine.tokens[str(length)] == expected([20 + length + i for i in range(length)], 6)


def test_a_cached_prefix_continues_with_the_right_state() -> None:
    engine = Engine(64, 64)
    shared = [30 + i for i in range(9)]
    engine.add("a", [*shared, 90], 3)
    engine.finish()
    engine.add("b", [*shared, 91, 92, 93, 94], 3)
    engine.add("c", [*shared, 90], 3)
    engine.finish()
    assert engine.num_cached == {"a": 0, "b": 8, "c": 8}
    assert engine.tokens["b"] == expected([*shared, 91, 92, 93, 94], 3)
    assert engine.tokens["c"] == engine.tokens["a"]


workloads = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=10
)


@given(workload=workloads, num_blocks=st.integers(9, 20), max_batch_tokens=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_any_workload_gives_every_request_its_own_tokens(
    workload: list[tuple[int, int, int, int]], num_blocks: int, max_batch_tokens: int
) -> None:
    """Few blocks (preemption), shared beginnings (prefix hits), arrivals between steps."""
    engine = Engine(num_blocks, max_batch_tokens)
    prompts: dict[str, tuple[list[int], int]] = {}
    for index, (family, length, max_tokens, num_steps) in enumerate(workload):
        prompt = [20 + family * 40 + i for i in range(length)]
        prompts[str(index)] = (prompt, max_tokens)
        engine.add(str(index), prompt, max_tokens)
        for _ in range(num_steps):
            engine.step()
    engine.finish()
    for name, (prompt, max_tokens) in prompts.items():
        assert engine.tokens[name] == expected(prompt, max_tokens)
    engine.scheduler.pool.check_integrity()
    assert engine.scheduler.pool.num_free_blocks == num_blocks
