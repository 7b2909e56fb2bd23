"""DeepSeek-V4's cache groups: the one place that says what a sequence's state is made of.

Everything is addressed by position: the row of position p is p % rows in a ring, entry p // ratio in a paged group. So
a slot needs no zeroing between sequences, and shortening a sequence is setting its length back.
"""

from __future__ import annotations

from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config
from headrace_engine.models.deepseek_v4.formats import packed_caches
from headrace_engine.models.protocol import CacheGroup, GroupKind, Holds, packed_groups

PAGED, STATE = GroupKind.PAGED, GroupKind.STATE

WINDOW = "window"  # raw kv of the last tokens, every layer
KV_OF_KIND = {LayerKind.CSA: "csa_kv", LayerKind.HCA: "hca_kv"}  # compressed entries
CARRY_OF_KIND = {LayerKind.CSA: "csa_carry", LayerKind.HCA: "hca_carry"}  # raw rows of groups not yet closed
INDEX = "csa_index"  # the indexer's keys
INDEX_CARRY = "csa_index_carry"


def cache_groups(config: V4Config, cache_dtype: str) -> tuple[CacheGroup, ...]:
    """Groups of all layers; a group without layers is left out.

    Carries hold fp32 rows of values then gates, each of one series (HCA) or two (CSA: `a` feeds the next entry, `b`
    this one). The window ring has exactly the rows that a query sees: a chunk attends the ring's earlier rows and its
    own, and only then writes its last rows.
    """
    dim, index_dim = config.head_dim, config.index_dim
    every = tuple(range(config.num_layers))
    groups = [CacheGroup(WINDOW, STATE, every, dim, cache_dtype, rows=config.window, holds=Holds.WINDOW)]
    csa, ratio = config.layers_of(LayerKind.CSA), config.csa_ratio
    if csa:
        carry_rows = 2 * ratio
        groups += [
            CacheGroup("csa_kv", PAGED, csa, dim, cache_dtype, ratio, holds=Holds.COMPRESSED),
            CacheGroup(INDEX, PAGED, csa, index_dim, cache_dtype, ratio, holds=Holds.INDEX_KEY),
            CacheGroup("csa_carry", STATE, csa, 4 * dim, "float32", rows=carry_rows, holds=Holds.CARRY),
            CacheGroup(INDEX_CARRY, STATE, csa, 4 * index_dim, "float32", rows=carry_rows, holds=Holds.CARRY),
        ]
    hca, ratio = config.layers_of(LayerKind.HCA), config.hca_ratio
    if hca:
        groups += [
            CacheGroup("hca_kv", PAGED, hca, dim, cache_dtype, ratio, holds=Holds.COMPRESSED),
            CacheGroup("hca_carry", STATE, hca, 2 * dim, "float32", rows=ratio, holds=Holds.CARRY),
        ]
    return packed_groups(groups, packed_caches(config).get(cache_dtype))
