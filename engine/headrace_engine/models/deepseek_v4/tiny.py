"""Writes small random checkpoints: every part of the architecture, in a few megabytes, the same bytes each time.

Used by tests and by pods without a download. Short prompts reach everything: window 8, an HCA entry every 8 tokens, an
indexer that must leave entries out from 20 tokens on. No torch here.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headrace_engine.models.deepseek_v4.config import V4Config, parse
from headrace_engine.models.deepseek_v4.names import Shape, expected_shapes
from headrace_engine.models.deepseek_v4.tiny_tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    byte_token_ids,
    write_tokenizer,
)
from headrace_engine.models.errors import ModelError

Array = np.ndarray[Any, Any]

FAMILIES = ("v4",)

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
    "num_nextn_predict_layers": 0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def write_tiny(path: str | Path, family: str = "v4", seed: int = 0) -> None:
    """Writes a checkpoint folder (config, weights under published names, tokenizer). Raises ModelError for a family.

    The files depend on nothing but family and seed. An existing folder's files of the same names are replaced.
    """
    if family not in FAMILIES:
        raise ModelError(f"no tiny model of family {family!r} (known: {', '.join(FAMILIES)})")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, TINY_CONFIG, seed)
    write_tokenizer(folder, TINY_CONFIG["max_position_embeddings"])


def write_checkpoint(folder: Path, raw_config: dict[str, Any], seed: int) -> None:
    """config.json, generation_config.json and random fp32 weights for any V4 configuration."""
    config = parse(raw_config)
    weights = {name: _random(name, shape, config, seed) for name, shape in expected_shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {key: raw_config[key] for key in ("bos_token_id", "eos_token_id") if key in raw_config}
    for name, value in (("config.json", raw_config), ("generation_config.json", ids)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _random(name: str, shape: Shape, config: V4Config, seed: int) -> Array:
    """One tensor's values. Its own generator, so that no tensor depends on the order of the others."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("tid2eid"):  # distinct experts for each token, as in a trained table
        return generator.random((shape[0], config.num_experts)).argsort(axis=1)[:, : shape[1]].astype(np.int64)
    normal = generator.standard_normal(shape, dtype=np.float32)
    if name.endswith(("norm.weight", "_scale")):
        return np.float32(1) + np.float32(0.1) * normal
    if name.endswith("gate.bias"):
        return np.float32(0.2) * normal
    if name.endswith((".ape", "attn_sink", "_base")):  # zero in a fresh model: they must matter here
        return np.float32(0.5) * normal
    if name == "embed.weight":
        return normal
    if name == "head.weight":
        return normal * np.float32(2 / shape[1] ** 0.5) * _readable_text(shape[0])
    return normal * np.float32(1.5 / shape[-1] ** 0.5)


def _readable_text(vocab_size: int) -> Array:
    """[vocab, 1] scale of the head's rows: mostly ASCII letters, sometimes another byte, now and then the end."""
    scale = np.full((vocab_size, 1), 1.0, dtype=np.float32)
    if vocab_size != VOCAB_SIZE:
        return scale
    scale[:] = 0.1
    scale[EOS_ID] = 0.9
    for value, token in byte_token_ids().items():
        scale[token] = 1.0 if chr(value).isascii() and (chr(value).isalpha() or value == 0x20) else 0.5
    return scale
