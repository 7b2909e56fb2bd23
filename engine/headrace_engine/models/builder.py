"""Reads a rank's tensors by published name, in the model dtype, and stacks those that run together."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace_engine import kernels
from headrace_engine.kv.records import PACKED_CACHES
from headrace_engine.models import page_advice
from headrace_engine.models.checkpoint import Checkpoint
from headrace_engine.models.dequantize import dequantize_into
from headrace_engine.models.errors import ModelError
from headrace_engine.models.headers import StoredTensor
from headrace_engine.models.mapped_rows import MappedRows
from headrace_engine.models.names import PACKED_FP4, Source
from headrace_engine.models.progress import LoadProgress
from headrace_engine.models.read_ahead import reading_order

Layer = TypeVar("Layer")

_MAX_THREADS = 8
_LAYER = re.compile(r"(?:layers|mtp)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

log = logging.getLogger(__name__)


@dataclass
class HyperConnection:
    """One site's weights, or the head's, fp32 (shapes: kernels.hyper_connection_mix and _head)."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


def resolve_dtype(name: str, own: str, what: str, others: Collection[str] = ()) -> str:
    """A key of DTYPES for "auto" (which is `own`) or a name. Raises ModelError."""
    if name == "auto":
        return own
    if name not in DTYPES:
        raise ModelError(f"{what} {name!r} is not supported (supported: {', '.join(['auto', *DTYPES, *others])})")
    return name


def resolve_cache_dtype(name: str, dtype: str) -> str:
    """Of the cache of a model that computes in `dtype`: that for "auto", a name, or one of PACKED_CACHES.

    Raises ModelError.
    """
    if name in PACKED_CACHES:
        return name
    resolved = resolve_dtype(name, dtype, "cache dtype", PACKED_CACHES)
    if resolved != dtype:
        log.warning(
            "a %s cache under a %s model is read by torch, not by the compiled kernels, which takes many times longer:"
            " leave the cache dtype to auto",
            resolved,
            dtype,
        )
    return resolved


def experts_of(rank: int, num_ranks: int, num_experts: int) -> range:
    """The experts that expert rank `rank` of `num_ranks` holds. Raises ModelError if they do not split."""
    if num_experts % num_ranks:
        raise ModelError(f"{num_experts} experts do not split over {num_ranks} ranks")
    per_rank = num_experts // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


class Builder:
    """Every tensor it returns is a copy: but for `rows`, nothing refers to mapped files.

    Quantized ones are dequantized, except for experts in FP4 that a kernel reads as they are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Mapping[str, Source],  # by published name
        dtype: torch.dtype,
        device: str,
        experts: range,  # of this rank
        progress: LoadProgress | None = None,
        mapped: Collection[str] = (),  # tensors that are only ever asked for with `rows`
    ) -> None:
        self._checkpoint, self._sources = checkpoint, sources
        self._dtype, self._device, self._experts = dtype, device, experts
        self._progress, self._mapped = progress, mapped
        self._num_threads = min(_MAX_THREADS, max(2, torch.get_num_threads()))
        needed = [name for name in sources if self._is_needed(name)]
        self._read_ahead = checkpoint.read_ahead(reading_order(self._layers(needed), self._num_threads))
        if progress is not None:
            progress.start(sum(self._num_bytes(name) for name in needed))

    def each_layer(self, build: Callable[[int], Layer], num_layers: int) -> list[Layer]:
        """[build(0), build(1), ...], several at a time: one waits for the disk while another converts."""
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="load") as pool:
            futures = [pool.submit(build, index) for index in range(num_layers)]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # those that run finish their layer
                raise

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor in the model dtype, or the given one."""
        target = torch.empty(self._sources[name].shape, dtype=dtype or self._dtype, device=self._device)
        self._read_into(target, name)
        return target

    def rows(self, name: str) -> MappedRows:
        """A table that stays where it is, in the mapped file: for what is too large to be read whole."""
        source = self._sources[name]
        scale = None if source.scale is None else self._checkpoint.read(source.scale)
        return MappedRows(self._checkpoint.read(source.name), scale)

    def wide(self, name: str) -> torch.Tensor:
        return self.tensor(name, torch.float32)

    def linear(self, name: str) -> kernels.Weight:
        return kernels.prepare(self.tensor(name))

    def fused(self, names: Sequence[str]) -> torch.Tensor:
        """Tensors with one input, stacked along their output axis, in the model dtype."""
        shape = (sum(self._heights(names)), *self._sources[names[0]].shape[1:])
        stack = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._read_rows(stack, names)
        return stack

    def fused_linear(self, parts: Sequence[Sequence[str]]) -> tuple[kernels.Weight, list[int]]:
        """Projections of one input as one weight, and the widths of its output's parts."""
        widths = [sum(self._heights(names)) for names in parts]
        return kernels.prepare(self.fused([name for names in parts for name in names])), widths

    def grouped_linear(self, name: str, num_groups: int) -> kernels.Weight:
        """A block-diagonal weight: stored [groups * n, k], used as [groups, n, k]."""
        stacked = self.tensor(name)
        return kernels.prepare(stacked.view(num_groups, len(stacked) // num_groups, -1))

    def hyper_connection(self, prefix: str) -> HyperConnection:
        return HyperConnection(self.wide(f"{prefix}_fn"), self.wide(f"{prefix}_base"), self.wide(f"{prefix}_scale"))

    def expert_stacks(
        self, prefix: str, projections: Sequence[Sequence[str]]
    ) -> list[kernels.Weight | kernels.Fp4Weight]:
        """For each list of projections [experts of this rank, out, in]: those of an expert one under the other.

        One expert after another is read whole, in the order of the files, as they are read ahead.
        """
        names = [
            [[f"{prefix}experts.{expert}.{name}.weight" for name in stacked] for expert in self._experts]
            for stacked in projections
        ]
        stacks = [self._empty_stack(of_experts) for of_experts in names]
        for index in sorted(range(len(self._experts)), key=lambda index: self._place(names[0][index][0])):
            for stack, of_experts in zip(stacks, names, strict=True):
                self._read_expert(stack, index, of_experts[index])
        return [stack.weight() for stack in stacks]

    def shared_expert(self, prefix: str) -> tuple[kernels.Weight, kernels.Weight]:
        """(w13, w2) of the expert that every token runs."""
        gate_up = self.fused([f"{prefix}shared_experts.{name}.weight" for name in ("w1", "w3")])
        return kernels.prepare(gate_up), self.linear(f"{prefix}shared_experts.w2.weight")

    def _empty_stack(self, names: Sequence[Sequence[str]]) -> kernels.WeightStack | kernels.Fp4Stack:
        """For the tensors of each expert, one under the other."""
        heights, depth = self._heights(names[0]), self._sources[names[0][0]].shape[1]
        are_fp4 = all(self._is_fp4(name) for parts in names for name in parts)
        if are_fp4 and kernels.Fp4Stack.fits(self._device, self._dtype, heights, depth):
            return kernels.Fp4Stack(len(names), heights, depth)
        shape = (len(names), sum(heights), depth)
        return kernels.WeightStack(torch.empty(shape, dtype=self._dtype, device=self._device))

    def _read_expert(self, stack: kernels.WeightStack | kernels.Fp4Stack, index: int, names: Sequence[str]) -> None:
        if isinstance(stack, kernels.WeightStack):
            stack.write(index, lambda target: self._read_rows(target, names))
            return
        for part, name in enumerate(names):
            self._take(name, partial(stack.write, index, part))

    def _place(self, name: str) -> tuple[Path, int]:
        """Where a tensor is: its file, and its first byte there."""
        stored = self._checkpoint.tensors[self._sources[name].name]
        return stored.file, stored.start

    def _heights(self, names: Sequence[str]) -> list[int]:
        return [self._num_outputs(name) for name in names]

    def _num_outputs(self, name: str) -> int:
        return self._sources[name].shape[0]

    def _read_rows(self, target: torch.Tensor, names: Sequence[str]) -> None:
        """Fill target's rows with tensors one under the other."""
        for part, name in zip(torch.split(target, self._heights(names)), names, strict=True):
            self._read_into(part, name)

    def _read_into(self, target: torch.Tensor, name: str) -> None:
        """Fill `target` with one tensor; a quantized one is dequantized. Raises ModelError naming file and tensor."""

        def fill(stored: torch.Tensor, scale: torch.Tensor | None) -> None:
            if scale is None:
                target.copy_(stored)
            else:
                dequantize_into(target, stored.to(target.device), scale.to(target.device))

        self._take(name, fill)

    def _take(self, name: str, use: Callable[[torch.Tensor, Any], None]) -> None:
        """use(tensor as stored, its scales or None); a ValueError becomes a ModelError naming file and tensor."""
        source, num_bytes = self._sources[name], self._num_bytes(name)
        self._read_ahead.took(num_bytes)  # before it is used: what is larger than the window is read ahead, too
        stored = self._checkpoint.read(source.name)
        page_advice.expect_sequential_reads(stored)
        scale = None if source.scale is None else self._checkpoint.read(source.scale)
        try:
            use(stored, scale)
        except ValueError as error:
            file = self._checkpoint.tensors[source.name].file
            raise ModelError(f"{file}: tensor {source.name}: {error}") from error
        if self._progress is not None:
            self._progress.add(num_bytes)

    def _is_fp4(self, name: str) -> bool:
        return self._checkpoint.tensors[self._sources[name].name].dtype in PACKED_FP4

    def _is_needed(self, name: str) -> bool:
        """Whether this rank reads the tensor: all but the experts of other ranks and what stays in its file."""
        expert = _EXPERT.search(name)
        return name not in self._mapped and (expert is None or int(expert[1]) in self._experts)

    def _layers(self, names: Sequence[str]) -> list[list[StoredTensor]]:
        """What is stored of the named tensors by layer, and last of those in no layer, which are read after all."""
        layers: dict[float, list[StoredTensor]] = {}
        for name in names:
            layer = _LAYER.match(name)
            layers.setdefault(float(layer[1]) if layer else math.inf, []).extend(self._stored(name))
        return [layers[number] for number in sorted(layers)]

    def _num_bytes(self, name: str) -> int:
        """In the checkpoint, scales included."""
        return sum(tensor.num_bytes for tensor in self._stored(name))

    def _stored(self, name: str) -> list[StoredTensor]:
        """A tensor as it is stored, and its scales if it has any."""
        source, tensors = self._sources[name], self._checkpoint.tensors
        return [tensors[source.name]] if source.scale is None else [tensors[source.name], tensors[source.scale]]
