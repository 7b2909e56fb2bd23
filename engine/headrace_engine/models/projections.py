"""Everything of a layer's attention that reads the layer's input: few large products instead of many small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.models.builder import Builder
from headrace_engine.models.rounding import Rounding


@dataclass(frozen=True)
class InputProjections:
    """The projections with FP8 weights in published checkpoints come first, those that are kept in bfloat16 follow.

    One weight serves all unless inputs are rounded, which only concerns the former.
    """

    weight: kernels.Weight  # [sum of splits, hidden]
    splits: list[int]  # widths of its outputs
    exact_weight: kernels.Weight | None  # [sum of exact_splits, hidden]: of the others where inputs are rounded
    exact_splits: list[int]
    rounding: Rounding

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [T, hidden] dt -> the outputs in order, [T, width] dt each (row-strided)."""
        outputs = list(torch.split(kernels.linear(self.rounding.of_input(x), self.weight), self.splits, dim=-1))
        if self.exact_weight is not None:
            outputs += torch.split(kernels.linear(x, self.exact_weight), self.exact_splits, dim=-1)
        return outputs


def read_input_projections(
    builder: Builder,
    prefix: str,
    quantized: Sequence[Sequence[str]],
    plain: Sequence[Sequence[str]],
    rounding: Rounding,
) -> InputProjections:
    """Of names behind `prefix`, in lists whose outputs stay together.

    quantized, plain: how published checkpoints keep the weights.
    """
    quantized, plain = ([[f"{prefix}{name}.weight" for name in names] for names in part] for part in (quantized, plain))
    if not (rounding.input_block and plain):
        return InputProjections(*builder.fused_linear([*quantized, *plain]), None, [], rounding)
    return InputProjections(*builder.fused_linear(quantized), *builder.fused_linear(plain), rounding)
