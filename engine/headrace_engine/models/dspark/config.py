"""DSpark's own hyper-parameters, and those it shares with its main model. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from headrace_engine.models.config_values import MixConfig, MoEConfig, RopeConfig, positive
from headrace_engine.models.errors import ModelError
from headrace_engine.models.protocol import CacheGroup, GroupKind, Holds

WINDOW = "dspark_window"  # kv of the last context rows, every stage


@dataclass(frozen=True)
class DsparkConfig:
    num_stages: int
    block_size: int  # tokens drafted at once
    noise_token_id: int  # stands for the tokens of a block that are not known yet
    entries: tuple[int, ...]  # layers of the main model at whose entry its streams are read
    markov_rank: int


class StageConfig(MoEConfig, MixConfig, Protocol):
    """A stage is a window-only layer of the main model's generation; its V4Config or V41Config has all of these."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope_dim(self) -> int: ...
    @property
    def num_output_groups(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def window_rope(self) -> RopeConfig: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_streams(self) -> int: ...


def parse_dspark(config: Mapping[str, Any], *, num_stages: int, reads_exits: bool) -> DsparkConfig:
    """From the `dspark_*` keys. Raises ModelError naming the key.

    reads_exits: `dspark_target_layer_ids` names layers whose output is read, else those whose input is.
    """
    num_layers, vocab_size = positive(config, "num_hidden_layers"), positive(config, "vocab_size")
    targets = config.get("dspark_target_layer_ids")
    if not isinstance(targets, list) or not targets or not all(_is_below(num_layers, layer) for layer in targets):
        raise ModelError(f"config.json: dspark_target_layer_ids must list layers below {num_layers}, got {targets!r}")
    if targets != sorted(set(targets)):
        raise ModelError(f"config.json: dspark_target_layer_ids must ascend, got {targets}")
    noise = config.get("dspark_noise_token_id")
    if noise is None or not _is_below(vocab_size, noise):
        raise ModelError(f"config.json: dspark_noise_token_id must be a token id, got {noise!r}")
    return DsparkConfig(
        num_stages=num_stages,
        block_size=positive(config, "dspark_block_size"),
        noise_token_id=noise,
        entries=tuple(layer + reads_exits for layer in targets),
        markov_rank=positive(config, "dspark_markov_rank"),
    )


def cache_groups(dspark: DsparkConfig, config: StageConfig, cache_dtype: str) -> tuple[CacheGroup, ...]:
    """A block's own rows are never kept, so the ring has the context rows that a block sees and no more."""
    stages = tuple(range(dspark.num_stages))
    window = GroupKind.STATE, stages, config.head_dim, cache_dtype
    return (CacheGroup(WINDOW, *window, rows=config.window, holds=Holds.WINDOW),)


def _is_below(bound: int, value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < bound
