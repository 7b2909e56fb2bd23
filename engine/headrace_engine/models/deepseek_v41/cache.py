"""DeepSeek-V4.1's cache groups: the one place that says what a sequence's state is made of.

Everything is addressed by position: the row of position p is p % rows in a ring, entry p // ratio in a paged group. So
a slot needs no zeroing between sequences, and shortening a sequence is setting its length back.
"""

from __future__ import annotations

from headrace_engine.models.deepseek_v41.config import V41Config
from headrace_engine.models.deepseek_v41.formats import packed_caches
from headrace_engine.models.protocol import CacheGroup, GroupKind, Holds, packed_groups

PAGED, STATE = GroupKind.PAGED, GroupKind.STATE

WINDOW = "window"  # raw kv of the last tokens, every layer


def entries_group(ratio: int) -> str:
    """Compressed entries of the kv sources of a ratio."""
    return f"kv_{ratio}"


def keys_group(ratio: int) -> str:
    """Their index keys."""
    return f"index_{ratio}"


def carry_group(ratio: int) -> str:
    """Values and gates, fp32, of the tokens of groups not yet closed; ratio 1 has none."""
    return f"carry_{ratio}"


def cache_groups(config: V41Config, cache_dtype: str) -> tuple[CacheGroup, ...]:
    """Groups of all layers. Layers that are no kv source own nothing but their window rows.

    The window ring has exactly the rows that a query sees: a chunk attends the ring's earlier rows and its own, and
    only then writes its last rows.
    """
    every = tuple(range(config.num_layers))
    groups = [CacheGroup(WINDOW, STATE, every, config.head_dim, cache_dtype, rows=config.window, holds=Holds.WINDOW)]
    for ratio in sorted({config.ratios[source] for source in config.kv_sources}):
        layers, dim, index_dim = config.kv_sources_of(ratio), config.head_dim, config.index_dim
        groups += [
            CacheGroup(entries_group(ratio), PAGED, layers, dim, cache_dtype, ratio, holds=Holds.COMPRESSED),
            CacheGroup(keys_group(ratio), PAGED, layers, index_dim, cache_dtype, ratio, holds=Holds.INDEX_KEY),
        ]
        if ratio > 1:
            name = carry_group(ratio)
            groups.append(CacheGroup(name, STATE, layers, 2 * dim, "float32", rows=ratio, holds=Holds.CARRY))
    return packed_groups(groups, packed_caches(config).get(cache_dtype))
