"""Each item of the transferred state is needed: without any single one, decode's logits are not those of one engine.

State is dropped row by row (one position's keys or carry, in one layer), compressed entries and index keys block by
block (a block is what one push carries) in one layer. A tensor that was forgotten in the layout, a slot that is pushed
one row short, a block that is left out: each would be an item that does not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.pd.engines import BLOCK, prompts_of
from tests.pd.ranks import Pair, generate_alone, greedy

from headrace_engine import models
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.protocol import CacheGroup, GroupKind
from headrace_engine.models.tiny import write_tiny
from headrace_engine.sequence import Row, Sequence

# The last group of every compressor lacks one token, so that every carried row is still to be used; and there are more
# compressed entries than the index takes, yet so few that each is taken in one of the steps.
PROMPT_TOKENS = 24
MAX_TOKENS = 12
# One prompt is enough for what attention reads. What the index reads decides by being above or below something else, so
# that a small part of it need not show with every prompt.
NUM_PROMPTS = 8
ROUNDING = 1e-4  # of logits of order 1; one engine and two differ by about 1e-6
WINDOW, CSA, HCA = 8, 4, 8  # of the tiny model
LIVE_POSITIONS = {  # of the state, as of all prompt tokens but the last, what is still to be read
    "window": range(PROMPT_TOKENS - WINDOW, PROMPT_TOKENS - 1),
    "csa_carry": range(PROMPT_TOKENS - 2 * CSA, PROMPT_TOKENS - 1),  # its groups overlap: the one before as well
    "csa_index_carry": range(PROMPT_TOKENS - 2 * CSA, PROMPT_TOKENS - 1),
    "hca_carry": range(PROMPT_TOKENS - HCA, PROMPT_TOKENS - 1),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "v4", 0)
    return models.load(path)


class Received:
    """A prompt's KV on a decode rank, of which a part can be dropped before it is used."""

    def __init__(self, model: DeepseekV4, pair: Pair, prompt: list[int]) -> None:
        self.prompt = prompt
        self._decode = pair.decode
        self._sequence = pair.receive(self.prompt, greedy(MAX_TOKENS))
        self.tokens, self.expected = generate_alone(model, self.prompt, MAX_TOKENS)
        num_blocks = -(-(PROMPT_TOKENS + MAX_TOKENS) // BLOCK)
        more = pair.decode.scheduler.pool.allocate_blocks(num_blocks - len(self._sequence.block_ids))
        self._block_ids = [*self._sequence.block_ids, *more]
        self._saved = {name: tensor.clone() for name, tensor in self._decode.cache.items()}

    def difference(self, group: CacheGroup | None = None, layer: int = 0, item: int = 0) -> float:
        """How far the logits get from one engine's if a row (state: of a position) or block (paged) was not pushed."""
        for name, tensor in self._decode.cache.items():
            tensor.copy_(self._saved[name])
        if group is not None and group.kind is GroupKind.STATE:
            self._decode.cache[group.name][self._sequence.state_slot, layer, item % group.rows] = 0
        elif group is not None:
            self._decode.cache[group.name][self._block_ids[item], layer] = 0
        worst = 0.0
        for number, expected in enumerate(self.expected):
            worst = max(worst, float((self._logits(number) - expected).abs().max()))
            if worst > 10 * ROUNDING:
                break
        return worst

    def _logits(self, number: int) -> torch.Tensor:
        """Of the step that generates this token, after one engine's tokens before it."""
        sequence: Sequence = dataclasses.replace(
            self._sequence,
            token_ids=self.prompt + self.tokens[:number],
            num_computed=PROMPT_TOKENS - 1 + number,
            block_ids=self._block_ids,
        )
        self._decode.runner.run([Row(sequence, 1, True)])
        return self._decode.model.logits.pop()[0]


@pytest.fixture(scope="module")
def received(model: DeepseekV4) -> Iterator[list[Received]]:
    pair = Pair(model)
    yield [Received(model, pair, prompt) for prompt in prompts_of([PROMPT_TOKENS] * NUM_PROMPTS, first=10)]
    pair.close()


def test_with_all_of_it_the_logits_are_those_of_one_engine(received: list[Received]) -> None:
    for each in received:
        assert each.difference() < ROUNDING


def test_every_group_of_the_cache_is_tested_here(model: DeepseekV4) -> None:
    groups = {group.name for group in model.cache_groups}
    assert groups == {*LIVE_POSITIONS, "csa_kv", "csa_index", "hca_kv"}


@pytest.mark.parametrize("name", LIVE_POSITIONS)
def test_without_any_one_row_of_the_state_they_differ(model: DeepseekV4, received: list[Received], name: str) -> None:
    group = _group(model, name)
    for layer in range(len(group.layers)):
        for position in LIVE_POSITIONS[name]:
            assert _matters(received, group, layer, position), f"layer {layer} position {position}"


@pytest.mark.parametrize("name", ["csa_kv", "csa_index", "hca_kv"])
def test_without_any_one_block_they_differ(model: DeepseekV4, received: list[Received], name: str) -> None:
    group = _group(model, name)
    num_blocks = -(-(PROMPT_TOKENS - 1) // BLOCK)
    for layer in range(len(group.layers)):
        for block in range(num_blocks):
            if (block * BLOCK + group.tokens_per_entry) < PROMPT_TOKENS:  # it has an entry already
                assert _matters(received, group, layer, block), f"layer {layer} block {block}"


def _matters(received: list[Received], group: CacheGroup, layer: int, item: int) -> bool:
    return any(each.difference(group, layer, item) > 10 * ROUNDING for each in received)


def _group(model: DeepseekV4, name: str) -> CacheGroup:
    return next(group for group in model.cache_groups if group.name == name)
