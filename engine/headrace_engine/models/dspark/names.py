"""Names and shapes of DSpark's tensors: `mtp.0` to `mtp.N`, in published form. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace_engine.models.dspark.config import DsparkConfig, StageConfig
from headrace_engine.models.names import Shape


@dataclass(frozen=True)
class MarkovNames:
    """What the generations call the two factors of the transition matrix."""

    embedding: str
    head: str


def dspark_shapes(
    dspark: DsparkConfig,
    config: StageConfig,
    layer_shapes: Callable[[int], Mapping[str, Shape]],
    markov: MarkovNames,
    *,
    has_head: bool,
) -> dict[str, Shape]:
    """layer_shapes: of a stage's ordinary tensors; has_head: a hyper-connection head collapses the last streams."""
    hidden, streams, last = config.hidden_size, config.num_streams, f"mtp.{dspark.num_stages - 1}."
    shapes: dict[str, Shape] = {
        "mtp.0.main_proj.weight": (hidden, len(dspark.entries) * hidden),
        "mtp.0.main_norm.weight": (hidden,),
    }
    for stage in range(dspark.num_stages):
        shapes.update({f"mtp.{stage}.{name}": shape for name, shape in layer_shapes(stage).items()})
    shapes[f"{last}norm.weight"] = (hidden,)
    if has_head:
        shapes.update({f"{last}{name}": shape for name, shape in head_shapes(streams, hidden).items()})
    shapes[last + markov.embedding] = (config.vocab_size, dspark.markov_rank)
    shapes[last + markov.head] = (config.vocab_size, dspark.markov_rank)
    shapes[f"{last}confidence_head.proj.weight"] = (1, hidden + dspark.markov_rank)
    return shapes


def head_shapes(num_streams: int, hidden_size: int) -> dict[str, Shape]:
    """Of a hyper-connection head."""
    return {
        "hc_head_fn": (num_streams, num_streams * hidden_size),
        "hc_head_base": (num_streams,),
        "hc_head_scale": (1,),
    }
