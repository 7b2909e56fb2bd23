"""Reads a rank's tensors by published name, in the model dtype, and stacks those that run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headrace_engine import kernels
from headrace_engine.models.checkpoint import Checkpoint
from headrace_engine.models.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class HyperConnection:
    """One site's weights, or the head's, fp32 (shapes: kernels.hyper_connection_mix and _head)."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


def resolve_dtype(name: str, own: str, what: str) -> str:
    """A key of DTYPES for "auto" (the checkpoint's own) or a name. Raises ModelError."""
    if name == "auto":
        return own
    if name not in DTYPES:
        raise ModelError(f"{what} {name!r} is not supported (supported: auto, float32, bfloat16)")
    return name


def experts_of(rank: int, num_ranks: int, num_experts: int) -> range:
    """The experts that expert rank `rank` of `num_ranks` holds. Raises ModelError if they do not split."""
    if num_experts % num_ranks:
        raise ModelError(f"{num_experts} experts do not split over {num_ranks} ranks")
    per_rank = num_experts // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


class Builder:
    """Every tensor it returns is a copy: nothing refers to the mapped files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored_names: Mapping[str, str],  # by published name
        dtype: torch.dtype,
        device: str,
        experts: range,  # of this rank
    ) -> None:
        self._checkpoint, self._stored_names = checkpoint, stored_names
        self._dtype, self._device, self._experts = dtype, device, experts

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor in the model dtype, or the given one."""
        stored = self._checkpoint.read(self._stored_names[name])
        return torch.empty(stored.shape, dtype=dtype or self._dtype, device=self._device).copy_(stored)

    def wide(self, name: str) -> torch.Tensor:
        return self.tensor(name, torch.float32)

    def linear(self, name: str) -> kernels.Weight:
        return kernels.prepare(self.tensor(name))

    def fused(self, names: Sequence[str]) -> torch.Tensor:
        """Tensors with one input, stacked along their output axis, in the model dtype."""
        parts = [self._checkpoint.read(self._stored_names[name]) for name in names]
        rows = sum(part.shape[0] for part in parts)
        stack = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        for target, part in zip(torch.split(stack, [part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(part)
        return stack

    def fused_linear(self, parts: Sequence[Sequence[str]]) -> tuple[kernels.Weight, list[int]]:
        """Projections of one input as one weight, and the widths of its output's parts."""
        widths = [sum(self._num_outputs(name) for name in names) for names in parts]
        return kernels.prepare(self.fused([name for names in parts for name in names])), widths

    def grouped_linear(self, name: str, num_groups: int) -> kernels.Weight:
        """A block-diagonal weight: stored [groups * n, k], used as [groups, n, k]."""
        stacked = self.tensor(name)
        return kernels.prepare(stacked.view(num_groups, len(stacked) // num_groups, -1))

    def hyper_connection(self, prefix: str) -> HyperConnection:
        return HyperConnection(self.wide(f"{prefix}_fn"), self.wide(f"{prefix}_base"), self.wide(f"{prefix}_scale"))

    def expert_stack(self, prefix: str, names: Sequence[str]) -> kernels.Weight:
        """[experts of this rank, out, in]: the named projections of each expert, one under the other."""
        first = self.fused([f"{prefix}experts.{self._experts[0]}.{name}.weight" for name in names])
        stack = torch.empty((len(self._experts), *first.shape), dtype=self._dtype, device=self._device)
        for target, expert in zip(stack, self._experts, strict=True):
            target.copy_(self.fused([f"{prefix}experts.{expert}.{name}.weight" for name in names]))
        return kernels.prepare(stack)

    def shared_expert(self, prefix: str) -> tuple[kernels.Weight, kernels.Weight]:
        """(w13, w2) of the expert that every token runs."""
        gate_up = self.fused([f"{prefix}shared_experts.{name}.weight" for name in ("w1", "w3")])
        return kernels.prepare(gate_up), self.linear(f"{prefix}shared_experts.w2.weight")

    def _num_outputs(self, name: str) -> int:
        return self._checkpoint.tensors[self._stored_names[name]].shape[0]
