"""What all layers of a step share: rotary angles, which token is whose, and the choice that lower layers have made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from headrace_engine.models.closing import Closing, closing_groups, sequence_of_token
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.rope import StepRope, step_rope


@dataclass
class Step:
    sequence: torch.Tensor  # [T], the sequence of each token
    ropes: dict[bool, StepRope]  # by "has compressed entries"
    closing: dict[int, Closing]  # by ratio
    entry_ropes: dict[int, StepRope]  # by ratio, at the positions of the entries that close
    # Written by index sources, read by the layers above them:
    selected: torch.Tensor | None = None  # [T, index_topk] int32 as kernels.select_entries; None: all that is visible
    blocks: torch.Tensor | None = None  # [T, num_blocks] int32 as kernels.select_entries_and_runs; None: no restriction


def begin_step(batch: ForwardBatch, frequencies: Mapping[bool, torch.Tensor], ratios: Iterable[int]) -> Step:
    """frequencies: of rope by "has compressed entries"; ratios: of the kv sources."""
    sequence = sequence_of_token(batch)
    closing = {ratio: closing_groups(batch, sequence, ratio) for ratio in ratios}
    return Step(
        sequence,
        {is_compressed: step_rope(batch.positions, table) for is_compressed, table in frequencies.items()},
        closing,
        {ratio: step_rope(each.first_positions, frequencies[True]) for ratio, each in closing.items()},
    )
