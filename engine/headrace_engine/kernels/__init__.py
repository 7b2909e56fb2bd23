"""The operations that a step is made of, each one function: compiled for the CPU, plain torch anywhere else.

A module holds one family: the public function (contract, checks, call), then its torch reference of the same result.
Which one runs is decided per tensor by `native.library_for`. `dt` in the docs is the model dtype, fp32 or bf16;
statistics, softmax and sums are fp32. Tensors are contiguous unless said; indices (slots, blocks, experts) are trusted.
"""

from headrace_engine.kernels.block_attention import block_attention
from headrace_engine.kernels.compressor import compress
from headrace_engine.kernels.experts import dense_mlp, expert_mlp, sum_choices
from headrace_engine.kernels.fp4_weights import Fp4Stack, Fp4Weight
from headrace_engine.kernels.hyper_connection import (
    hyper_connection_head,
    hyper_connection_head_weights,
    hyper_connection_mix,
    hyper_connection_update,
    single_pass_mix,
    weighted_norm,
    weighted_sum,
)
from headrace_engine.kernels.indexer import select_entries, select_entries_and_runs, select_within_runs
from headrace_engine.kernels.linears import grouped_linear, linear
from headrace_engine.kernels.norm_rope import head_norm_rope, rms_norm, rms_norm_rope
from headrace_engine.kernels.records import read_records, round_to_records, write_records
from headrace_engine.kernels.routing import route
from headrace_engine.kernels.shared_kv_attention import Entries, attention, write_ring
from headrace_engine.kernels.weights import Weight, WeightStack, prepare

__all__ = [
    "Entries",
    "Fp4Stack",
    "Fp4Weight",
    "Weight",
    "WeightStack",
    "attention",
    "block_attention",
    "compress",
    "dense_mlp",
    "expert_mlp",
    "grouped_linear",
    "head_norm_rope",
    "hyper_connection_head",
    "hyper_connection_head_weights",
    "hyper_connection_mix",
    "hyper_connection_update",
    "linear",
    "prepare",
    "read_records",
    "rms_norm",
    "rms_norm_rope",
    "round_to_records",
    "route",
    "select_entries",
    "select_entries_and_runs",
    "select_within_runs",
    "single_pass_mix",
    "sum_choices",
    "weighted_norm",
    "weighted_sum",
    "write_records",
    "write_ring",
]
