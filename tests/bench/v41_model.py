"""A DeepSeek-V4.1 of the benchmark model's size: the same widths, heads and experts, and every layer mode."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.bench import checkpoint as v4
from tests.bench.peer import install as peer

from headrace_engine.models.deepseek_v4.tiny_tokenizer import write_tokenizer
from headrace_engine.models.deepseek_v41.tiny import TINY_CONFIG, write_checkpoint

MAX_POSITION = 1 << 18


def make_config() -> dict[str, Any]:
    """config.json: the tiny model's, with the benchmark model's dimensions."""
    config = copy.deepcopy(TINY_CONFIG)
    config["text_config"] |= {
        "hidden_size": v4.HIDDEN,
        "num_attention_heads": v4.NUM_HEADS,
        "head_dim": v4.HEAD_DIM,
        "qk_rope_head_dim": v4.ROPE_DIM,
        "q_lora_rank": v4.QUERY_RANK,
        "o_groups": v4.NUM_OUTPUT_GROUPS,
        "o_lora_rank": v4.OUTPUT_RANK,
        "sliding_window": 128,
        "num_hidden_layers": 6,
        "compress_ratios": [0, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 64,
        "candidate_block_size": 64,
        "index_n_heads": v4.NUM_INDEX_HEADS,
        "index_head_dim": v4.INDEX_HEAD_DIM,
        "index_topk": v4.INDEX_TOP_K,
        "n_routed_experts": v4.NUM_EXPERTS,
        "num_experts_per_tok": v4.EXPERTS_PER_TOKEN,
        "moe_intermediate_size": v4.EXPERT_HIDDEN,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [667],
        "max_position_embeddings": MAX_POSITION,
    }
    return config


def v41_directory() -> Path:
    """The model's folder, written once into the cache folder."""
    directory = peer.cache_directory() / "bench-model-v41"
    if not (directory / "config.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory, MAX_POSITION)
        write_checkpoint(directory, make_config(), seed=1)
    return directory
