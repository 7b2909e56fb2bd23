"""The plain DSpark against an independent implementation's numbers (MTP: tests/engine/model/test_streams.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.reference.deepseek_v41 import Reference, token_map
from tests.reference.draft_oracle import EXPECTED
from tests.reference.drafters import DsparkReference, SinglePassGeneration
from tokenizers import Tokenizer

from headrace_engine.models.deepseek_v41.tiny import TINY_TEXT_CONFIG
from headrace_engine.models.tiny import write_tiny

TOLERANCE = 1e-4  # of fp32 logits of order 1


def test_dspark_drafts_equal_nemo_automodels(tmp_path: Path) -> None:
    expected = load_file(EXPECTED)
    write_tiny(tmp_path, "v41", 0)
    config, weights = TINY_TEXT_CONFIG, load_file(tmp_path / "model.safetensors")
    compressed = token_map(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    tokens = expected["tokens"].tolist()
    entered = Reference(config, weights, compressed, dtype=torch.float64).run(tokens)[1]
    means = torch.cat([entered[layer].mean(dim=1) for layer in config["dspark_target_layer_ids"]], dim=1)
    markov = ("markov_head.embed.weight", "markov_head.head.weight")
    reference = DsparkReference(SinglePassGeneration(config), weights, markov)
    for number, anchor in enumerate(expected["v41.anchors"].tolist()):
        drafted = reference.draft(means[:anchor], tokens[anchor])
        assert float((drafted.logits - expected["v41.logits"][number]).abs().max()) < TOLERANCE
        assert drafted.tokens == expected["v41.drafts"][number].tolist()
        assert drafted.confidences == pytest.approx(expected["v41.confidences"][number].tolist(), abs=1e-5)
