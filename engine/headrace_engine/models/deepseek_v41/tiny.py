"""The tiny DeepSeek-V4.1, a few megabytes: every part of the architecture, reached by short prompts. No torch here.

Window 8, entries of two tokens and of one, each layer mode on both, an indexer that must leave entries out from 5 of
them on, candidate blocks that exclude some from 14 tokens on, n-grams that look back before the sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_engine.models.deepseek_v4.tiny_tokenizer import (
    BOS_ID,
    EOS_ID,
    NOISE_ID,
    PAD_ID,
    VOCAB_SIZE,
    byte_token_ids,
)
from headrace_engine.models.deepseek_v41.config import parse
from headrace_engine.models.deepseek_v41.draft import drafter_shapes
from headrace_engine.models.deepseek_v41.names import FP8_BLOCK, expected_shapes, published_storage
from headrace_engine.models.random_checkpoint import Published, write_random

_NUM_FOLDED = 29  # 26 capitals, and three of the four kinds of white space

TINY_TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],  # the last three are of the drafter
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    # Many index heads: with few, scores are often exactly 0, and a top-k among equal scores is arbitrary.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [667, 871],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "engram_vocab_size": 101,
    # Unlike the published pad id this one's number changes when tokens are normalised, which must not be forgotten.
    "engram_pad_token_id": byte_token_ids()[ord("~")],
    "engram_compressed_vocab_size": VOCAB_SIZE - _NUM_FOLDED,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": NOISE_ID,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 6,
    "dspark_num_experts_per_tok": 3,
}

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "float32",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "text_config": TINY_TEXT_CONFIG,
}


PUBLISHED = Published(
    config={
        "dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "expert_dtype": "fp4",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": list(FP8_BLOCK),
        },
    },
    storage=published_storage,
    fp8_block=FP8_BLOCK,
)


def write_checkpoint(folder: Path, raw_config: dict[str, Any], seed: int, *, quantized: bool = False) -> None:
    """config.json, generation_config.json and random weights for any V4.1 configuration and its drafter.

    Weights in fp32, or as published.
    """
    config = parse(raw_config)
    published = PUBLISHED if quantized else None
    shapes = {**expected_shapes(config), **drafter_shapes(raw_config)}
    write_random(folder, raw_config, shapes, config.num_experts, seed, published=published)
