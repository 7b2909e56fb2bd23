"""The tiny DeepSeek-V4, a few megabytes: every part of the architecture, reached by short prompts. No torch here.

Window 8, an HCA entry every 8 tokens, an indexer that must leave entries out from 20 tokens on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_engine.models.deepseek_v4.config import parse
from headrace_engine.models.deepseek_v4.draft import drafter_shapes
from headrace_engine.models.deepseek_v4.names import FP8_BLOCK, expected_shapes, published_storage
from headrace_engine.models.deepseek_v4.tiny_tokenizer import BOS_ID, EOS_ID, NOISE_ID, PAD_ID, VOCAB_SIZE
from headrace_engine.models.random_checkpoint import Published, write_random

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    # Many index heads: with few, scores are often exactly 0, and a top-k among equal scores is arbitrary.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_layer_types": ["hash_moe", "hash_moe", "hash_moe", "moe", "moe", "moe"],
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
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
    "num_nextn_predict_layers": 1,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


# The same model with the later release's drafter, which reads the last three layers.
TINY_0731_CONFIG: dict[str, Any] = {
    **TINY_CONFIG,
    "dspark_block_size": 5,
    "dspark_noise_token_id": NOISE_ID,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 16,
}

PUBLISHED = Published(
    config={
        "dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": {
            "activation_scheme": "dynamic",
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
    """config.json, generation_config.json and random weights for any V4 configuration and its drafter.

    Weights in fp32, or as published.
    """
    config = parse(raw_config)
    published = PUBLISHED if quantized else None
    shapes = {**expected_shapes(config), **drafter_shapes(raw_config)}
    write_random(folder, raw_config, shapes, config.num_experts, seed, published=published)
