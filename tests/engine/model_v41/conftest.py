"""The tiny DeepSeek-V4.1, loaded once, and the plain reference's logits of a few texts, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.reference.deepseek_v41 import Reference, token_map
from tokenizers import Tokenizer

from headrace_engine import models
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.deepseek_v41.tiny import TINY_TEXT_CONFIG
from headrace_engine.models.tiny import write_tiny

Expected = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-v41")
    write_tiny(path, family="v41", seed=0)
    return path


@pytest.fixture(scope="session")
def model(tiny_path: Path) -> DeepseekV41:
    loaded = models.load(tiny_path)
    assert isinstance(loaded, DeepseekV41)
    return loaded


@pytest.fixture(scope="session")
def expected(tiny_path: Path) -> Expected:
    """Logits [tokens, vocab] of a text. Causal: the first rows of a longer text that begins so are the same."""
    compressed = token_map(Tokenizer.from_file(str(tiny_path / "tokenizer.json")))
    weights = load_file(tiny_path / "model.safetensors")
    reference = Reference(TINY_TEXT_CONFIG, weights, compressed, dtype=torch.float64)
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        key = tuple(tokens)
        longer = next((text for text in known if text[: len(key)] == key), None)
        if longer is None:
            known[key] = reference.logits(key).float()
            longer = key
        return known[longer][: len(key)]

    return logits
