"""DeepSeek-V4's sizes, from its configuration alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace_engine.kv.records import PACKED_CACHES
from headrace_engine.models.deepseek_v4.cache import cache_groups
from headrace_engine.models.deepseek_v4.config import V4Config, describe, parse
from headrace_engine.models.deepseek_v4.draft import cache_groups as draft_groups
from headrace_engine.models.deepseek_v4.draft import drafter_shapes, layer_config, parse_drafter
from headrace_engine.models.deepseek_v4.formats import packed_caches
from headrace_engine.models.deepseek_v4.names import FP8_BLOCK, expected_shapes, published_storage
from headrace_engine.models.dspark.config import DsparkConfig
from headrace_engine.models.names import Shape
from headrace_engine.models.outline import DrafterOutline, Outline, TensorOutline

_WIDE = re.compile(r"(norm\.weight|\.ape|\.attn_sink|\.gate\.(weight|bias)|confidence_head\.proj\.weight)$|(^|\.)hc_")


def outline(
    raw_config: Mapping[str, Any], generation_config: Mapping[str, Any], dtype: str, cache_dtype: str
) -> Outline:
    """dtype: "float32" or "bfloat16"; cache_dtype: these, "fp8" or "fp4". Raises ModelError."""
    config = parse(raw_config)
    return Outline(
        info=describe(raw_config, generation_config),
        layer_kinds=tuple(kind.value for kind in config.layer_kinds),
        cache_groups=cache_groups(config, cache_dtype),
        packed_caches=packed_caches(config),
        tensors=_tensors(expected_shapes(config)),
        fp8_block=FP8_BLOCK,
        drafter=_drafter(raw_config, config, dtype if cache_dtype in PACKED_CACHES else cache_dtype),
    )


def _drafter(raw_config: Mapping[str, Any], config: V4Config, cache_dtype: str) -> DrafterOutline | None:
    drafter = parse_drafter(raw_config)
    if drafter is None:
        return None
    layers = layer_config(config, drafter)
    return DrafterOutline(
        kind="dspark" if isinstance(drafter, DsparkConfig) else "mtp",
        num_layers=layers.num_layers,
        num_drafts=drafter.block_size if isinstance(drafter, DsparkConfig) else 1,
        num_experts=layers.num_experts,
        cache_groups=draft_groups(drafter, layers, cache_dtype),
        tensors=_tensors(drafter_shapes(raw_config)),
    )


def _tensors(shapes: Mapping[str, Shape]) -> tuple[TensorOutline, ...]:
    return tuple(
        TensorOutline(name, shape, published_storage(name), bool(_WIDE.search(name))) for name, shape in shapes.items()
    )
