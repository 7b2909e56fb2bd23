"""However prefill cuts a prompt into steps, decode's tokens are those of an independent implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.pd.engines import BLOCK, prompts_of
from tests.pd.ranks import NUM_BLOCKS, Pair, generate_alone
from tests.pd.reference import Reference

from headrace_engine import models
from headrace_engine.models.deepseek_v4.model import DeepseekV4

# Around the tiny model's ratios (4, 8), its window and the block (8), and where the index begins to choose (20).
SHORT = [1, 2, 3, 4, 5, *range(BLOCK - 1, 3 * BLOCK + 2), 31, 32, 33, 64]
LENGTHS = {1: SHORT, 3: [*SHORT, 130, 200], 40: [*SHORT, 130, 200, 2000], 4096: [*SHORT, 130, 200, 2000]}
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def model(reference: Reference) -> DeepseekV4:
    return models.load(Path(reference.directory))


@pytest.mark.parametrize("chunk", [3, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 40, 4096))])
def test_tokens_do_not_depend_on_the_chunk(reference: Reference, model: DeepseekV4, chunk: int) -> None:
    torch.set_num_threads(1)
    pair = Pair(model, chunk)
    try:
        for prompt in prompts_of(LENGTHS[chunk]):
            expected = reference.tokens(prompt, MAX_TOKENS)
            assert pair.generate(prompt, MAX_TOKENS) == expected, f"apart, {len(prompt)} tokens"
            if chunk == 40:
                assert generate_alone(model, prompt, MAX_TOKENS)[0] == expected, f"together, {len(prompt)} tokens"
        assert pair.decode.scheduler.pool.num_free_blocks == NUM_BLOCKS
        assert pair.prefill.scheduler.pool.num_free_blocks == NUM_BLOCKS
    finally:
        pair.close()
