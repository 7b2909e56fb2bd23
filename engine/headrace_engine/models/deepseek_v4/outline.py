"""DeepSeek-V4's sizes, from its configuration alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace_engine.kv.records import INDEX_68, INDEX_132, KV_584
from headrace_engine.models.deepseek_v4.cache import cache_groups
from headrace_engine.models.deepseek_v4.config import describe, parse
from headrace_engine.models.deepseek_v4.names import FP8_BLOCK, expected_shapes, published_storage
from headrace_engine.models.outline import Outline, PackedCache, TensorOutline

_WIDE = re.compile(r"(norm\.weight|\.ape|\.attn_sink|\.gate\.(weight|bias))$|(^|\.)hc_")


def outline(raw_config: Mapping[str, Any], generation_config: Mapping[str, Any], cache_dtype: str) -> Outline:
    """cache_dtype: "float32" or "bfloat16". Raises ModelError."""
    config = parse(raw_config)
    fits = (config.head_dim, config.index_dim) == (KV_584.dim, INDEX_68.dim)
    return Outline(
        info=describe(raw_config, generation_config),
        layer_kinds=tuple(kind.value for kind in config.layer_kinds),
        cache_groups=cache_groups(config, cache_dtype),
        packed_caches=tuple(PackedCache(KV_584, KV_584, key) for key in (INDEX_132, INDEX_68)) if fits else (),
        tensors=tuple(
            TensorOutline(name, shape, published_storage(name), bool(_WIDE.search(name)))
            for name, shape in expected_shapes(config).items()
        ),
        fp8_block=FP8_BLOCK,
    )
