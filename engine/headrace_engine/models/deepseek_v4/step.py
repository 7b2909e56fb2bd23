"""What all layers of a step share: rotary angles, and the groups of tokens that the step completes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace_engine.models.closing import Closing, closing_groups, sequence_of_token
from headrace_engine.models.protocol import ForwardBatch
from headrace_engine.models.rope import step_rope


class Step:
    """frequencies: of rope by "has compressed entries"."""

    def __init__(self, batch: ForwardBatch, frequencies: Mapping[bool, torch.Tensor]) -> None:
        self.ropes = {is_compressed: step_rope(batch.positions, table) for is_compressed, table in frequencies.items()}
        self._batch = batch
        self._closing: dict[int, Closing] = {}

    def closing(self, ratio: int) -> Closing:
        """The groups of so many tokens, worked out once for all layers."""
        if ratio not in self._closing:
            self._closing[ratio] = closing_groups(self._batch, sequence_of_token(self._batch), ratio)
        return self._closing[ratio]
