"""config.json: the published one, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.cli import main
from headrace_engine.models import ModelError
from headrace_engine.models.deepseek_v41.cache import cache_groups
from headrace_engine.models.deepseek_v41.config import LayerMode, describe, parse
from headrace_engine.models.deepseek_v41.tiny import TINY_CONFIG
from headrace_engine.models.protocol import GroupKind

PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "vision_config": {"num_hidden_layers": 32},
    "text_config": {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "sliding_window": 128,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1048576,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
}


def changed(**values: Any) -> dict[str, Any]:
    config = copy.deepcopy(TINY_CONFIG)
    for key, value in values.items():
        if value is None:
            del config["text_config"][key]
        else:
            config["text_config"][key] = value
    return config


def test_modes_of_the_published_layers() -> None:
    config = parse(PUBLISHED)
    by_mode = {mode: [i for i in range(40) if config.mode(i) is mode] for mode in LayerMode}
    assert by_mode[LayerMode.WINDOW] == [0, 1]
    assert by_mode[LayerMode.FULL] == [2, 8, 14, 20]
    assert by_mode[LayerMode.REINDEX] == [24, 28, 32, 36]
    assert [config.kv_source(layer) for layer in (2, 7, 8, 13, 14, 19, 20, 39)] == [2, 2, 8, 8, 14, 14, 20, 20]


def test_bytes_of_the_published_cache_in_bf16() -> None:
    """Three sources make an entry for two tokens and one for each, of 512 + 128 numbers; windows have 128 rows."""
    groups = {group.name: group for group in cache_groups(parse(PUBLISHED), "bfloat16")}
    paged = [group for group in groups.values() if group.kind is GroupKind.PAGED]
    per_token = sum(len(g.layers) * g.bytes_per_entry / g.tokens_per_entry for g in paged)
    assert per_token == 3 * (1024 + 256) / 2 + 1280
    window = groups["window"]
    assert len(window.layers) * window.rows * window.bytes_per_entry == 5_242_880
    assert groups["carry_2"].layers == (2, 8, 14)


def test_bytes_in_the_formats_of_published_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert main(["describe", str(tmp_path), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["bytes_per_token"] for row in found["cache_bytes"]] == [3200, 1490, 890]
    assert [row["window_bytes_per_sequence"] for row in found["cache_bytes"]] == [5_242_880, 2_703_360, 2_703_360]
    tables = (384006168 + 384016682) * (256 + 8)  # in their file only
    weights = found["weights"]
    assert weights["rank_stored_bytes"]["shared"] - tables < weights["rank_memory_bytes"]["shared"] < 100e9
    assert found["num_parameters"] == pytest.approx(552e9 + 196e9, rel=0.01)
    drafter = found["drafter"]
    sizes = [drafter[key] for key in ("kind", "num_layers", "num_drafts", "num_experts")]
    assert sizes == ["dspark", 3, 5, 128]
    assert [group["rows"] * group["bytes_per_entry"] for group in drafter["cache_groups"]] == [131_072]  # a stage's


def test_what_the_frontend_learns() -> None:
    info = describe(PUBLISHED, {})
    assert (info.architecture, info.max_position, info.eos_token_ids) == ("deepseek_v41", 1048576, (1,))
    assert (info.block_multiple, info.num_experts, info.dtype) == (2, 384, "bfloat16")


def test_both_names_of_the_pad_id() -> None:
    config = parse(changed(engram_pad_token_id=None, engram_pad_id=5))
    assert config.engram is not None
    assert config.engram.pad_token_id == 5


def test_without_engram_and_candidates() -> None:
    config = parse(changed(engram_layer_ids=[], candidate_source_layer_id=-1))
    assert config.engram is None
    assert config.candidates is None


REFUSED = [
    ({"hidden_size": None}, "hidden_size must be a positive integer"),
    ({"compress_ratios": [0, 0, 2]}, "compress_ratios has 3 items for 10 layers"),
    ({"compress_ratios": "2"}, "compress_ratios must list"),
    ({"kv_source_layer_ids": [4, 2, 6]}, "kv_source_layer_ids must ascend"),
    ({"kv_source_layer_ids": [2, 4]}, "layer 6 and its kv source 4 differ in ratio"),
    ({"kv_source_layer_ids": [4, 6], "index_source_layer_ids": [4, 6, 8]}, "layer 2 has no kv source"),
    ({"index_source_layer_ids": [2, 4, 8]}, "must be in index_source_layer_ids too"),
    ({"index_source_layer_ids": [1, 2, 4, 6, 8]}, "layer 1 has compress ratio 0"),
    ({"candidate_source_layer_id": 4}, "must be the last of kv_source_layer_ids"),
    ({"candidate_topk_blocks": 1}, "must exceed index_topk"),
    ({"candidate_source_layer_id": "six"}, "candidate_source_layer_id must be a layer number"),
    ({"engram_num_embeddings": [667]}, "engram_num_embeddings must give a number of rows"),
    ({"engram_pad_token_id": 9999}, "engram_pad_token_id must be a token id"),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be at least 2"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' is not supported"),
    ({"qk_rope_head_dim": 7}, "7 rotary dims do not fit"),
    ({"o_groups": 3}, "4 heads do not split into 3 o_groups"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(list(change)) for change, _ in REFUSED])
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(changed(**change))


def test_a_flat_config_is_refused() -> None:
    with pytest.raises(ModelError, match="text_config, which is missing"):
        parse({"model_type": "deepseek_v41", **TINY_CONFIG["text_config"]})
