"""DeepSeek-V4.1's sizes, from its configuration alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace_engine.kv.records import INDEX_68, KV_288, KV_528
from headrace_engine.models.deepseek_v41.cache import cache_groups
from headrace_engine.models.deepseek_v41.config import describe, parse
from headrace_engine.models.deepseek_v41.names import FP8_BLOCK, expected_shapes, published_storage
from headrace_engine.models.outline import Outline, PackedCache, TensorOutline
from headrace_engine.models.shards import Storage

_WIDE = re.compile(r"(norm\.weight|\.attn_sink|\.gate\.(weight|bias)|\.[qk]_weight)$|(^|\.)hc_")


def outline(raw_config: Mapping[str, Any], generation_config: Mapping[str, Any], cache_dtype: str) -> Outline:
    """cache_dtype: "float32" or "bfloat16". Raises ModelError."""
    config = parse(raw_config)
    fits = (config.head_dim, config.index_dim) == (KV_528.dim, INDEX_68.dim)
    storages = {name: published_storage(name) for name in expected_shapes(config)}
    return Outline(
        info=describe(raw_config, generation_config),
        layer_kinds=tuple(config.mode(layer).value for layer in range(config.num_layers)),
        cache_groups=cache_groups(config, cache_dtype),
        packed_caches=tuple(PackedCache(KV_528, each, INDEX_68) for each in (KV_528, KV_288)) if fits else (),
        tensors=tuple(
            TensorOutline(name, shape, storages[name], bool(_WIDE.search(name)), storages[name] is Storage.FP8_ROWS)
            for name, shape in expected_shapes(config).items()
        ),
        fp8_block=FP8_BLOCK,
    )
