"""DeepSeek-V4.1 apart: what prefill pushes, with a token carried or not, lets decode go on as the reference does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.pd.engines import BLOCK, Engine, generate, pd_tokens, prompts_of, running
from tests.pd.ranks import NUM_BLOCKS, Pair, generate_alone
from tests.reference.deepseek_v41 import Reference, token_map
from tokenizers import Tokenizer

from headrace_engine import models
from headrace_engine.models.deepseek_v41.tiny import TINY_TEXT_CONFIG
from headrace_engine.models.protocol import Model
from headrace_engine.models.tiny import write_tiny

# Around window and block (8), odd and even (groups of two), where the index chooses (5) and candidates count (13).
LENGTHS = [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 2]
MAX_TOKENS = 5


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny-v41")
    write_tiny(path, "v41", 0)
    return path


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    return models.load(tiny_path)


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Reference:
    compressed = token_map(Tokenizer.from_file(str(tiny_path / "tokenizer.json")))
    return Reference(TINY_TEXT_CONFIG, load_file(tiny_path / "model.safetensors"), compressed, torch.float64)


def assert_greedy(reference: Reference, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the reference's best after all before it."""
    best = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :].argmax(dim=1).tolist()
    assert tokens == best, f"{len(prompt)} tokens"


@pytest.mark.parametrize("chunk", [3, 40])
def test_apart_and_together_give_the_tokens_of_the_reference(model: Model, reference: Reference, chunk: int) -> None:
    pair = Pair(model, chunk)
    try:
        for prompt in prompts_of(LENGTHS, first=chunk):
            apart = pair.generate(prompt, MAX_TOKENS)
            assert_greedy(reference, prompt, apart)
            assert generate_alone(model, prompt, MAX_TOKENS)[0] == apart
        assert pair.decode.scheduler.pool.num_free_blocks == NUM_BLOCKS
    finally:
        pair.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine, Engine]]:
    roles = ("prefill", "decode", "unified")
    prefill, decode, unified = (Engine("--role", role, family="v41") for role in roles)
    with running(prefill, decode, unified):
        yield prefill, decode, unified


@pytest.mark.slow
def test_processes_apart_and_together(engines: tuple[Engine, Engine, Engine], reference: Reference) -> None:
    prefill, decode, unified = engines
    for prompt in prompts_of(LENGTHS):
        tokens = pd_tokens(prefill.url, decode.url, prompt, MAX_TOKENS)
        assert_greedy(reference, prompt, tokens)
        assert generate(unified.url, prompt, max_tokens=MAX_TOKENS) == tokens
    prefill.wait_all_free()
    decode.wait_all_free()
