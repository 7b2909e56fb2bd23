"""What all layers of a step share: rotary angles, which token is whose, and the choice that lower layers have made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from headrace_engine.models.closing import Closing, closing_groups, sequence_of_token
from headrace_engine.models.deepseek_v41.replay import is_new
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

    def of_rows(self, rows: torch.Tensor) -> Step:
        """What layers above the last kv source need of it for some of the step's rows [K]."""
        return Step(
            self.sequence[rows],
            {key: StepRope(rope.cos[rows], rope.sin[rows], rope.frequencies) for key, rope in self.ropes.items()},
            closing={},
            entry_ropes={},
            selected=None if self.selected is None else self.selected[rows],
            blocks=None if self.blocks is None else self.blocks[rows],
        )


def begin_step(batch: ForwardBatch, frequencies: Mapping[bool, torch.Tensor], ratios: Iterable[int]) -> Step:
    """frequencies: of rope by "has compressed entries"; ratios: of the kv sources."""
    sequence = sequence_of_token(batch)
    closing = {ratio: _new_groups(closing_groups(batch, sequence, ratio), batch) for ratio in ratios}
    return Step(
        sequence,
        {is_compressed: step_rope(batch.positions, table) for is_compressed, table in frequencies.items()},
        closing,
        {ratio: step_rope(each.first_positions, frequencies[True]) for ratio, each in closing.items()},
    )


def _new_groups(closing: Closing, batch: ForwardBatch) -> Closing:
    """Without those whose entries a prefix hit has brought."""
    chosen = is_new(batch, closing.tokens, closing.sequences)
    return Closing(closing.ratio, closing.tokens[chosen], closing.sequences[chosen], closing.groups[chosen])
