"""DeepSeek-V4.1's drafter: the settings and tensors of its DSpark stages. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from headrace_engine.models.config_values import positive
from headrace_engine.models.deepseek_v41.config import V41Config, parse
from headrace_engine.models.deepseek_v41.names import layer_shapes, match_drafter
from headrace_engine.models.dspark.config import DsparkConfig, parse_dspark
from headrace_engine.models.dspark.names import MarkovNames, dspark_shapes
from headrace_engine.models.names import Shape, Source, Stored

MARKOV = MarkovNames("markov_head.embed.weight", "markov_head.head.weight")


def parse_drafter(raw_config: Mapping[str, Any]) -> DsparkConfig | None:
    """None: the checkpoint has no drafter. Raises ModelError naming the key."""
    text = raw_config["text_config"]
    if not text.get("num_nextn_predict_layers") or "dspark_block_size" not in text:
        return None
    return parse_dspark(text, num_stages=positive(text, "num_nextn_predict_layers"), reads_exits=False)


def layer_config(raw_config: Mapping[str, Any], drafter: DsparkConfig) -> V41Config:
    """The main model's, with the drafter's stages alone: a window, and experts of their own. Raises ModelError."""
    text, main = raw_config["text_config"], parse(raw_config)
    return dataclasses.replace(
        main,
        ratios=(0,) * drafter.num_stages,
        kv_sources=(),
        index_sources=(),
        candidates=None,
        engram=None,
        num_experts=positive(text, "dspark_n_routed_experts", main.num_experts),
        experts_per_token=positive(text, "dspark_num_experts_per_tok", main.experts_per_token),
    )


def drafter_shapes(raw_config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every tensor of the drafter, by published name; none if there is no drafter."""
    drafter = parse_drafter(raw_config)
    if drafter is None:
        return {}
    config = layer_config(raw_config, drafter)
    return dspark_shapes(drafter, config, lambda stage: layer_shapes(config, stage), MARKOV, has_head=False)


def match_checkpoint_drafter(raw_config: Mapping[str, Any], stored: Iterable[Stored]) -> dict[str, Source]:
    """Published name -> source of every tensor of the drafter. Raises ModelError."""
    return match_drafter(drafter_shapes(raw_config), stored)
