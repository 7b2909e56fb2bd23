"""A DeepSeek-V4.1 of the benchmark model's size: the same widths, heads and experts, and every layer mode.

What a step costs at long contexts is as published: entries of two tokens and of one, 32 index heads of 128, the best
512 entries, candidates of 2048 blocks of 8. Only the share of layers that choose is larger here, three of six: of forty
there are eight.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from tests.bench import checkpoint as v4
from tests.bench.peer import install as peer

from headrace_engine.models.deepseek_v4.tiny_tokenizer import write_tokenizer
from headrace_engine.models.deepseek_v41.tiny import TINY_CONFIG, write_checkpoint

MAX_POSITION = 1 << 18


def make_config() -> dict[str, Any]:
    """config.json: the tiny model's, with the benchmark model's dimensions."""
    config = copy.deepcopy(TINY_CONFIG) | {"dtype": "bfloat16"}
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
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0],  # the last three are of the drafter
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_n_heads": 32,
        "index_head_dim": v4.INDEX_HEAD_DIM,
        "index_topk": v4.INDEX_TOP_K,
        "n_routed_experts": v4.NUM_EXPERTS,
        "num_experts_per_tok": v4.EXPERTS_PER_TOKEN,
        "moe_intermediate_size": v4.EXPERT_HIDDEN,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [667],
        "dspark_target_layer_ids": [3, 4, 5],
        "max_position_embeddings": MAX_POSITION,
    }
    return config


def v41_directory() -> Path:
    """The model's folder, written into the cache folder unless it is there as `make_config` says."""
    directory, config = peer.cache_directory() / "bench-model-v41", make_config()
    if not _has_config(directory, config):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_tokenizer(directory, MAX_POSITION)
        write_checkpoint(directory, config, seed=1)
    return directory


def _has_config(directory: Path, config: dict[str, Any]) -> bool:
    file = directory / "config.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")) == config
