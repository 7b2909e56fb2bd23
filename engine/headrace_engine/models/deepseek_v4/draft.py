"""Which drafter a DeepSeek-V4 checkpoint brings: its settings, tensors and cache. No torch here.

The first release (April) has one multi-token-prediction layer; V4-0731 has DSpark's three stages under the same names
`mtp.*`, and still says `num_nextn_predict_layers: 1`, which means nothing there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_engine.models.config_values import positive
from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config, parse
from headrace_engine.models.deepseek_v4.names import layer_shapes, match_drafter
from headrace_engine.models.dspark import config as dspark_config
from headrace_engine.models.dspark.config import DsparkConfig, parse_dspark
from headrace_engine.models.dspark.names import MarkovNames, dspark_shapes, head_shapes
from headrace_engine.models.errors import ModelError
from headrace_engine.models.names import Shape, Source, Stored
from headrace_engine.models.protocol import CacheGroup, GroupKind, Holds

MTP_WINDOW = "mtp_window"  # raw kv of the last tokens
MARKOV = MarkovNames("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_NUM_STAGES = 3  # of DSpark, unless config.json says otherwise


@dataclass(frozen=True)
class MtpConfig:
    """One more layer, which reads the main model's last streams and the next token (report, section 2.1)."""


def parse_drafter(raw_config: Mapping[str, Any]) -> MtpConfig | DsparkConfig | None:
    """None: the checkpoint has no drafter. Raises ModelError naming the key."""
    if "dspark_block_size" in raw_config:
        return parse_dspark(raw_config, num_stages=positive(raw_config, "n_mtp_layers", _NUM_STAGES), reads_exits=True)
    num_layers = raw_config.get("num_nextn_predict_layers") or 0
    if num_layers not in (0, 1):
        raise ModelError(f"config.json: num_nextn_predict_layers = {num_layers!r} is not supported (supported: 0, 1)")
    return MtpConfig() if num_layers else None


def layer_config(config: V4Config, drafter: MtpConfig | DsparkConfig) -> V4Config:
    """The main model's, with the drafter's layers alone: a window, no compressor, experts chosen by score."""
    num_layers = drafter.num_stages if isinstance(drafter, DsparkConfig) else 1
    return dataclasses.replace(config, layer_kinds=(LayerKind.WINDOW,) * num_layers, hash_layers=(False,) * num_layers)


def drafter_shapes(raw_config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every tensor of the drafter, by published name; none if there is no drafter."""
    drafter = parse_drafter(raw_config)
    if drafter is None:
        return {}
    config = layer_config(parse(raw_config), drafter)
    if isinstance(drafter, DsparkConfig):
        return dspark_shapes(drafter, config, lambda stage: layer_shapes(config, stage), MARKOV, has_head=True)
    hidden = config.hidden_size
    shapes = {
        "e_proj.weight": (hidden, hidden),
        "h_proj.weight": (hidden, hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        **layer_shapes(config, 0),
        "norm.weight": (hidden,),
        **head_shapes(config.num_streams, hidden),
    }
    return {f"mtp.0.{name}": shape for name, shape in shapes.items()}


def match_checkpoint_drafter(raw_config: Mapping[str, Any], stored: Iterable[Stored]) -> dict[str, Source]:
    """Published name -> source of every tensor of the drafter. Raises ModelError."""
    return match_drafter(drafter_shapes(raw_config), stored)


def cache_groups(
    drafter: MtpConfig | DsparkConfig, config: V4Config, cache_dtype: str, num_drafts: int = 1
) -> tuple[CacheGroup, ...]:
    """num_drafts: of the MTP layer, which writes the rows of its drafts, but the last one's, before they are accepted.

    They must not replace rows that are still seen if they are not.
    """
    if isinstance(drafter, DsparkConfig):
        return dspark_config.cache_groups(drafter, config, cache_dtype)
    rows = config.window + num_drafts - 1
    return (CacheGroup(MTP_WINDOW, GroupKind.STATE, (0,), config.head_dim, cache_dtype, rows=rows, holds=Holds.WINDOW),)
