"""DeepSeek-V4's cache groups: the one place that says what a sequence's state is made of.

Everything is addressed by position: the row of position p is p % rows in a ring, entry p // ratio in a paged group. So
a slot needs no zeroing between sequences, and shortening a sequence is setting its length back.
"""

from __future__ import annotations

from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config
from headrace_engine.models.protocol import CacheGroup, GroupKind

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
    groups = [
        CacheGroup(
            WINDOW, GroupKind.STATE, tuple(range(config.num_layers)), config.head_dim, cache_dtype, rows=config.window
        )
    ]
    csa = config.layers_of(LayerKind.CSA)
    if csa:
        ratio = config.csa_ratio
        groups += [
            CacheGroup("csa_kv", GroupKind.PAGED, csa, config.head_dim, cache_dtype, tokens_per_entry=ratio),
            CacheGroup(INDEX, GroupKind.PAGED, csa, config.index_dim, cache_dtype, tokens_per_entry=ratio),
            CacheGroup("csa_carry", GroupKind.STATE, csa, 4 * config.head_dim, "float32", rows=2 * ratio),
            CacheGroup(INDEX_CARRY, GroupKind.STATE, csa, 4 * config.index_dim, "float32", rows=2 * ratio),
        ]
    hca = config.layers_of(LayerKind.HCA)
    if hca:
        ratio = config.hca_ratio
        groups += [
            CacheGroup("hca_kv", GroupKind.PAGED, hca, config.head_dim, cache_dtype, tokens_per_entry=ratio),
            CacheGroup("hca_carry", GroupKind.STATE, hca, 2 * config.head_dim, "float32", rows=ratio),
        ]
    return tuple(groups)
