"""DeepSeek-V4.1 with the roundings of its training, against the oracle's and the plain reference's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.model.harness import PagedRun, assert_mostly_close, random_tokens
from tests.reference.deepseek_v41 import Reference, token_map
from tests.reference.rounding import V41Rounding
from tests.reference.v41_cases import CASES, EXPECTED, make_tokenizer, write_case
from tokenizers import Tokenizer

from headrace_engine import models
from headrace_engine.models.deepseek_v41.tiny import TINY_TEXT_CONFIG


@pytest.mark.parametrize("name", CASES)
def test_a_rounded_cache_gives_the_logits_of_nemo_automodel(name: str, tmp_path: Path) -> None:
    write_case(tmp_path, name, len(set(token_map(make_tokenizer()))))
    stored = load_file(EXPECTED)
    tokens, expected = stored[f"{name}.tokens"].tolist(), stored[f"{name}.rounded_logits"]
    run = PagedRun(models.load(tmp_path, fake_quantization="cache"), block_size=24, num_blocks=8)
    for chunks in ([61], [5, 1]):
        logits = run.prompt(tokens, chunks)
        assert_mostly_close(logits, expected, share=0.8)
        assert float((logits.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9
    assert float((expected - stored[f"{name}.logits"]).abs().amax(-1).median()) > 0.1, "the roundings must matter"


def test_rounded_inputs_give_the_logits_of_the_reference(tiny_path: Path) -> None:
    compressed = token_map(Tokenizer.from_file(str(tiny_path / "tokenizer.json")))
    weights = load_file(tiny_path / "model.safetensors")
    rounding = V41Rounding(cache=True, inputs=True)
    reference = Reference(TINY_TEXT_CONFIG, weights, compressed, torch.float64, rounding)
    run = PagedRun(models.load(tiny_path, fake_quantization="all"))
    texts = [random_tokens(5, seed) for seed in range(3)]
    expected = torch.cat([reference.logits(text) for text in texts]).float()
    assert_mostly_close(torch.cat([run.prompt(text, [4]) for text in texts]), expected, share=0.5)
