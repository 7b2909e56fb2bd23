"""What a model's config.json says of its sizes: layers, cache, tensors; and the arithmetic on them. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace_engine.kv.records import CacheRecords
from headrace_engine.models.headers import StoredTensor
from headrace_engine.models.info import ModelInfo
from headrace_engine.models.names import Shape, Source
from headrace_engine.models.protocol import CacheGroup, GroupKind, Holds
from headrace_engine.models.quantize import FP4_ROW, FP8_ROW_BLOCK
from headrace_engine.models.shards import Storage

_PLAIN_BYTES = {Storage.F32: 4, Storage.BF16: 2, Storage.I64: 8}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class TensorOutline:
    """One tensor of the model."""

    name: str  # published
    shape: Shape
    storage: Storage  # of the published checkpoints
    is_wide: bool  # in memory fp32, whatever the model dtype
    is_mapped: bool = False  # stays in its file, of which a step reads some rows

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Of a routed expert: sharded in an expert-parallel group."""
        return ".experts." in self.name

    @property
    def fp4_bytes(self) -> int:
        """In FP4, scales included."""
        return self.num_elements // 2 + self.num_elements // FP4_ROW

    def memory_bytes(self, dtype: str) -> int:
        """As numbers of the model's dtype, where no kernel reads them as they are stored."""
        if self.is_mapped:
            return 0
        if self.storage is Storage.I64:
            return 8 * self.num_elements
        return self.num_elements * (4 if self.is_wide else _DTYPE_BYTES[dtype])

    def packed_bytes(self, dtype: str, stored_bytes: int) -> int:
        """In memory, where kernels read experts in FP4: those that are stored so (in as many bytes) stay so."""
        stays = self.is_expert and dtype == "bfloat16" and stored_bytes == self.fp4_bytes
        return stored_bytes if stays else self.memory_bytes(dtype)

    def published_bytes(self, fp8_block: tuple[int, int]) -> int:
        """In a published checkpoint, scales included."""
        if self.storage in (Storage.FP8, Storage.FP8_ROWS):
            rows, columns = self.shape
            fp8_block = fp8_block if self.storage is Storage.FP8 else FP8_ROW_BLOCK
            return rows * columns + -(-rows // fp8_block[0]) * -(-columns // fp8_block[1])
        if self.storage is Storage.FP4:
            return self.fp4_bytes
        return self.num_elements * _PLAIN_BYTES[self.storage]


@dataclass(frozen=True)
class DrafterOutline:
    """What a checkpoint brings to draft tokens with: a whole drafter, not a rank's share."""

    kind: str
    num_layers: int
    num_drafts: int  # tokens at once
    num_experts: int
    cache_groups: tuple[CacheGroup, ...]
    tensors: tuple[TensorOutline, ...]


@dataclass(frozen=True)
class Outline:
    """A whole model, not a rank's share."""

    info: ModelInfo
    layer_kinds: tuple[str, ...]  # what each layer attends
    cache_groups: tuple[CacheGroup, ...]
    packed_caches: Mapping[str, CacheRecords]  # by the cache dtype that asks for them
    tensors: tuple[TensorOutline, ...]
    fp8_block: tuple[int, int]  # of the published checkpoints
    drafter: DrafterOutline | None


@dataclass(frozen=True)
class CacheBytes:
    per_token: float  # of what grows with a sequence, all layers
    window: int  # per sequence
    carry: int  # per sequence


def cache_bytes(groups: Iterable[CacheGroup]) -> CacheBytes:
    per_token, fixed = 0.0, {Holds.WINDOW: 0, Holds.CARRY: 0}
    for group in groups:
        if group.kind is GroupKind.PAGED:
            per_token += len(group.layers) * group.bytes_per_entry / group.tokens_per_entry
        else:
            fixed[group.holds] += len(group.layers) * group.rows * group.bytes_per_entry
    return CacheBytes(per_token, fixed[Holds.WINDOW], fixed[Holds.CARRY])


@dataclass(frozen=True)
class WeightBytes:
    """One rank's weights."""

    shared: int  # what every rank has
    experts: int  # its routed experts

    @property
    def total(self) -> int:
        return self.shared + self.experts


def weight_bytes(sizes: Iterable[tuple[TensorOutline, int]], num_expert_ranks: int) -> WeightBytes:
    """From every tensor's bytes to a rank's, with the experts split evenly over num_expert_ranks."""
    shared = experts = 0
    for tensor, num_bytes in sizes:
        if tensor.is_expert:
            experts += num_bytes
        else:
            shared += num_bytes
    return WeightBytes(shared, experts // num_expert_ranks)


def stored_bytes(sources: Mapping[str, Source], stored: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Published name -> bytes in a checkpoint that is there, scales included."""
    return {
        name: stored[source.name].num_bytes + (stored[source.scale].num_bytes if source.scale else 0)
        for name, source in sources.items()
    }
