"""Models of one layer kind only, against transformers: a mistake cannot hide behind another layer's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.harness import PagedRun, assert_close, random_tokens, reference_logits

from headrace_engine import models
from headrace_engine.models.deepseek_v4.tiny import TINY_CONFIG, write_checkpoint

VARIANTS: dict[str, dict[str, Any]] = {
    "window only": {"layer_types": ["sliding_attention"] * 2},
    "CSA only": {"layer_types": ["compressed_sparse_attention"] * 2},
    "HCA only": {"layer_types": ["heavily_compressed_attention"] * 2},
    "CSA with room for every entry": {"layer_types": ["compressed_sparse_attention"] * 2, "index_topk": 64},
    "CSA whose choice just fills at 64 tokens": {"layer_types": ["compressed_sparse_attention"] * 2, "index_topk": 16},
    "experts and gates that are clamped often": {"layer_types": ["sliding_attention"] * 2, "swiglu_limit": 0.2},
    "hash routing only": {"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["hash_moe"] * 2},
    "published ratios, no YaRN": {
        "layer_types": None,
        "compress_rates": None,
        "compress_ratios": [4, 128],
        "rope_scaling": None,
    },
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_one_kind_of_layer_equals_transformers(tmp_path: Path, variant: str) -> None:
    from transformers import AutoModelForCausalLM

    config = {**TINY_CONFIG, "num_hidden_layers": 2, "mlp_layer_types": ["moe"] * 2, **VARIANTS[variant]}
    write_checkpoint(tmp_path, {key: value for key, value in config.items() if value is not None}, seed=1)
    model = models.load(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    length = 140 if "published" in variant else 75
    tokens = random_tokens(length, seed=7)
    expected = reference_logits(reference, tokens)
    block_size = max(8, model.block_multiple)
    for chunks in ([length], [11, 1]):
        run = PagedRun(model, block_size=block_size, num_blocks=24)
        assert_close(run.prompt(tokens, chunks), expected)
