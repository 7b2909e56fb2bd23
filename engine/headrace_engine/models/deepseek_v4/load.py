"""Builds a DeepSeek-V4 model from a checkpoint folder: reads this rank's tensors and fuses those that run together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace_engine import kernels
from headrace_engine.models.checkpoint import Checkpoint, content_digest
from headrace_engine.models.deepseek_v4.attention import Attention, AttentionWeights, CompressorWeights
from headrace_engine.models.deepseek_v4.config import LayerKind, V4Config, parse
from headrace_engine.models.deepseek_v4.model import DeepseekV4, HyperConnection, Layer
from headrace_engine.models.deepseek_v4.moe import MoE
from headrace_engine.models.deepseek_v4.names import Stored, match
from headrace_engine.models.errors import ModelError
from headrace_engine.models.info import eos_token_ids, read_configs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    path: Path, *, expert_rank: int, num_expert_ranks: int, dtype: str, cache_dtype: str, device: str
) -> DeepseekV4:
    """The model with experts [expert_rank * E / n, (expert_rank + 1) * E / n) of n ranks. Raises ModelError.

    dtype, cache_dtype: "auto" (the checkpoint's own), "float32", "bfloat16".
    """
    raw_config, generation_config = read_configs(path)
    config = parse(raw_config)
    if config.num_experts % num_expert_ranks:
        raise ModelError(f"{config.num_experts} experts do not split over {num_expert_ranks} ranks")
    per_rank = config.num_experts // num_expert_ranks
    experts = range(expert_rank * per_rank, (expert_rank + 1) * per_rank)
    dtype = _resolved(dtype, config, "dtype")
    cache_dtype = _resolved(cache_dtype, config, "cache dtype")
    with Checkpoint(path) as checkpoint:
        builder = _Builder(config, checkpoint, _DTYPES[dtype], device, experts)
        layers = [builder.layer(index) for index in range(config.num_layers)]
        return DeepseekV4(
            config,
            embedding=builder.tensor("embed.weight"),
            layers=layers,
            head_hc=builder.hyper_connection("hc_head"),
            norm=builder.wide("norm.weight"),
            head=builder.linear("head.weight"),
            cache_dtype=cache_dtype,
            eos_token_ids=eos_token_ids(raw_config, generation_config),
            digest=_digest(config, checkpoint.files, dtype),
        )


def _resolved(name: str, config: V4Config, what: str) -> str:
    if name == "auto":
        return config.dtype
    if name not in _DTYPES:
        raise ModelError(f"{what} {name!r} is not supported (supported: auto, float32, bfloat16)")
    return name


def _digest(config: V4Config, files: list[Path], dtype: str) -> str:
    """Identity of what is computed: hyper-parameters, weights, and the precision of the computation."""
    return hashlib.blake2b(f"{config}|{content_digest(files)}|{dtype}".encode(), digest_size=16).hexdigest()


class _Builder:
    """Reads tensors by published name. Every tensor it returns is a copy: nothing refers to the mapped files."""

    def __init__(
        self, config: V4Config, checkpoint: Checkpoint, dtype: torch.dtype, device: str, experts: range
    ) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._dtype, self._device, self._experts = dtype, device, experts
        stored = (Stored(name, item.shape, item.dtype) for name, item in checkpoint.tensors.items())
        self._stored_names = match(config, stored)

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

    def hyper_connection(self, prefix: str) -> HyperConnection:
        return HyperConnection(self.wide(f"{prefix}_fn"), self.wide(f"{prefix}_base"), self.wide(f"{prefix}_scale"))

    def layer(self, index: int) -> Layer:
        prefix = f"layers.{index}."
        return Layer(
            attention=self._attention(index, f"{prefix}attn."),
            moe=self._moe(index, f"{prefix}ffn."),
            attention_hc=self.hyper_connection(f"{prefix}hc_attn"),
            moe_hc=self.hyper_connection(f"{prefix}hc_ffn"),
            attention_norm=self.wide(f"{prefix}attn_norm.weight"),
            moe_norm=self.wide(f"{prefix}ffn_norm.weight"),
        )

    def _attention(self, index: int, prefix: str) -> Attention:
        config = self._config
        kind = config.layer_kinds[index]
        inputs = [["wq_a"], ["wkv"]]  # outputs that stay together
        if kind is not LayerKind.WINDOW:
            inputs.append(["compressor.wkv", "compressor.wgate"])
        if kind is LayerKind.CSA:
            inputs += [["indexer.compressor.wkv", "indexer.compressor.wgate"], ["indexer.weights_proj"]]
        parts = [[f"{prefix}{name}.weight" for name in names] for names in inputs]
        w_out_a = self.tensor(f"{prefix}wo_a.weight")
        weights = AttentionWeights(
            w_in=kernels.prepare(self.fused([name for names in parts for name in names])),
            in_splits=[sum(self._num_outputs(name) for name in names) for names in parts],
            w_q=self.linear(f"{prefix}wq_b.weight"),
            w_index_q=self.linear(f"{prefix}indexer.wq_b.weight") if kind is LayerKind.CSA else None,
            w_out_a=kernels.prepare(w_out_a.view(config.num_output_groups, config.output_lora_rank, -1)),
            w_out_b=self.linear(f"{prefix}wo_b.weight"),
            q_norm=self.wide(f"{prefix}q_norm.weight"),
            kv_norm=self.wide(f"{prefix}kv_norm.weight"),
            sinks=self.wide(f"{prefix}attn_sink"),
        )
        compressor = index_compressor = None
        if kind is not LayerKind.WINDOW:
            compressor = self._compressor(f"{prefix}compressor.")
        if kind is LayerKind.CSA:
            index_compressor = self._compressor(f"{prefix}indexer.compressor.")
        return Attention(config, index, weights, compressor, index_compressor)

    def _compressor(self, prefix: str) -> CompressorWeights:
        return CompressorWeights(position_bias=self.wide(f"{prefix}ape"), norm=self.wide(f"{prefix}norm.weight"))

    def _num_outputs(self, name: str) -> int:
        return self._checkpoint.tensors[self._stored_names[name]].shape[0]

    def _moe(self, index: int, prefix: str) -> MoE:
        is_hash = self._config.hash_layers[index]
        return MoE(
            config=self._config,
            gate=self.wide(f"{prefix}gate.weight"),
            bias=None if is_hash else self.wide(f"{prefix}gate.bias"),
            experts_of_token=self._expert_table(f"{prefix}gate.tid2eid") if is_hash else None,
            w13=kernels.prepare(self._expert_stack(prefix, ("w1", "w3"))),
            w2=kernels.prepare(self._expert_stack(prefix, ("w2",))),
            shared_w13=kernels.prepare(self.fused([f"{prefix}shared_experts.{name}.weight" for name in ("w1", "w3")])),
            shared_w2=self.linear(f"{prefix}shared_experts.w2.weight"),
        )

    def _expert_table(self, name: str) -> torch.Tensor:
        table = self.tensor(name, torch.int64)
        if int(table.min()) < 0 or int(table.max()) >= self._config.num_experts:
            raise ModelError(f"tensor {name} names experts outside 0..{self._config.num_experts - 1}")
        return table

    def _expert_stack(self, prefix: str, names: tuple[str, ...]) -> torch.Tensor:
        """[experts of this rank, out, in]: the named projections of each expert, one under the other."""
        first = self.fused([f"{prefix}experts.{self._experts[0]}.{name}.weight" for name in names])
        stack = torch.empty((len(self._experts), *first.shape), dtype=self._dtype, device=self._device)
        for target, expert in zip(stack, self._experts, strict=True):
            target.copy_(self.fused([f"{prefix}experts.{expert}.{name}.weight" for name in names]))
        return stack
