"""`headrace-engine describe DIR`: what a checkpoint is and what it needs, from its JSON files and headers alone."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_engine.config import CACHE_DTYPES

if TYPE_CHECKING:
    from headrace_engine.models.outline import Outline, TensorOutline
    from headrace_engine.models.protocol import CacheGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="config.json is enough; with weights, they are checked against it"
    )
    parser.add_argument("-o", "--output", default="table", choices=("table", "json"), help="default: table")
    parser.add_argument("--data", type=int, default=1, metavar="N", help="data-parallel ranks (default: 1)")
    parser.add_argument("--expert-parallel", action="store_true", help="the ranks share the experts, else all have all")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of weights in memory")
    parser.add_argument("--cache-dtype", default="auto", choices=CACHE_DTYPES, help="of the cache")


def run(arguments: argparse.Namespace) -> str:
    """What to print. Raises ModelError."""
    from headrace_engine import models

    folder = Path(arguments.directory)
    outline = models.outline_of(folder, arguments.dtype, arguments.cache_dtype)
    stored = models.stored_bytes_of(folder)
    num_expert_ranks = arguments.data if arguments.expert_parallel else 1
    if not 1 <= num_expert_ranks <= outline.info.num_experts or outline.info.num_experts % num_expert_ranks:
        raise models.ModelError(f"{outline.info.num_experts} experts do not split over {num_expert_ranks} ranks")
    dtype = outline.info.dtype if arguments.dtype == "auto" else arguments.dtype
    found = report(outline, stored, dtype=dtype, cache_dtype=arguments.cache_dtype, num_expert_ranks=num_expert_ranks)
    return json.dumps(found, indent=1) if arguments.output == "json" else table(found)


def report(
    outline: Outline, stored: dict[str, int] | None, *, dtype: str, cache_dtype: str, num_expert_ranks: int
) -> dict[str, Any]:
    """stored: bytes of each tensor in the checkpoint; None: there are no weights, sizes are those of published ones."""
    info, tensors = outline.info, outline.tensors
    return {
        "architecture": info.architecture,
        "num_parameters": sum(tensor.num_elements for tensor in tensors),
        "max_position": info.max_position,
        "block_multiple": info.block_multiple,
        "layers": list(outline.layer_kinds),
        "cache_groups": [_group(group) for group in outline.cache_groups],
        "cache_bytes": _cache_rows(outline, cache_dtype),
        "weights": {
            "num_expert_ranks": num_expert_ranks,
            "num_experts_per_rank": info.num_experts // num_expert_ranks,
            "dtype": dtype,
            "are_here": stored is not None,
            **_rank_bytes(tensors, outline.fp8_block, stored, dtype, num_expert_ranks),
        },
        "drafter": _drafter(outline, stored, dtype, num_expert_ranks),
    }


def _drafter(
    outline: Outline, stored: dict[str, int] | None, dtype: str, num_expert_ranks: int
) -> dict[str, Any] | None:
    """Sizes of a rank are left out where its experts do not split over as many ranks as the main model's."""
    drafter = outline.drafter
    if drafter is None:
        return None
    is_here = stored is not None and drafter.tensors[0].name in stored
    found = {
        "kind": drafter.kind,
        "num_layers": drafter.num_layers,
        "num_drafts": drafter.num_drafts,
        "num_experts": drafter.num_experts,
        "num_parameters": sum(tensor.num_elements for tensor in drafter.tensors),
        "are_here": is_here,
        "cache_groups": [_group(group) for group in drafter.cache_groups],
    }
    if drafter.num_experts % num_expert_ranks == 0:
        sizes = stored if is_here else None
        found |= _rank_bytes(drafter.tensors, outline.fp8_block, sizes, dtype, num_expert_ranks)
    return found


def _rank_bytes(
    tensors: Sequence[TensorOutline],
    fp8_block: tuple[int, int],
    stored: dict[str, int] | None,
    dtype: str,
    num_expert_ranks: int,
) -> dict[str, dict[str, int]]:
    from headrace_engine.models.outline import weight_bytes

    sizes = stored or {tensor.name: tensor.published_bytes(fp8_block) for tensor in tensors}
    in_memory = weight_bytes(((t, t.memory_bytes(dtype)) for t in tensors), num_expert_ranks)
    in_fp4 = weight_bytes(((t, t.packed_bytes(dtype, sizes[t.name])) for t in tensors), num_expert_ranks)
    in_storage = weight_bytes(((t, sizes[t.name]) for t in tensors), num_expert_ranks)
    return {
        key: {"shared": found.shared, "experts": found.experts, "total": found.total}
        for key, found in (
            ("rank_memory_bytes", in_memory),
            ("rank_memory_fp4_bytes", in_fp4),
            ("rank_stored_bytes", in_storage),
        )
    }


def _group(group: CacheGroup) -> dict[str, Any]:
    from headrace_engine.models.protocol import GroupKind

    is_paged = group.kind is GroupKind.PAGED
    return {
        "name": group.name,
        "kind": group.kind.value,
        "holds": group.holds.value,
        "layers": list(group.layers),
        "tokens_per_entry": group.tokens_per_entry if is_paged else None,
        "rows": None if is_paged else group.rows,
        "dtype": group.format_name,
        "bytes_per_entry": group.bytes_per_entry,
        "transfer": group.transfer.value,
    }


def _cache_rows(outline: Outline, cache_dtype: str) -> list[dict[str, Any]]:
    from headrace_engine.models.outline import cache_bytes
    from headrace_engine.models.protocol import packed_groups

    groups = outline.cache_groups
    rows = [(cache_dtype, _format_names(groups), cache_bytes(groups))]
    for other in outline.packed_caches.keys() - {cache_dtype}:
        packed = packed_groups(groups, outline.packed_caches[other])
        rows.append((other, _format_names(packed), cache_bytes(packed)))
    return [
        {
            "cache_dtype": name,
            "format": format_names,
            "bytes_per_token": size.per_token,
            "window_bytes_per_sequence": size.window,
            "carry_bytes_per_sequence": size.carry,
        }
        for name, format_names, size in sorted(rows, key=lambda row: -row[2].per_token)
    ]


def _format_names(groups: Iterable[CacheGroup]) -> str:
    from headrace_engine.models.protocol import Holds

    return " + ".join(dict.fromkeys(group.format_name for group in groups if group.holds is not Holds.CARRY))


def table(found: dict[str, Any]) -> str:
    """The report for people."""
    weights = found["weights"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(found["layers"]).items())
    formats = [
        (
            row["cache_dtype"],
            row["format"],
            f"{row['bytes_per_token']:,.2f}",
            f"{row['window_bytes_per_sequence']:,}",
            f"{row['carry_bytes_per_sequence']:,}",
        )
        for row in found["cache_bytes"]
    ]
    lines = [
        f"{found['architecture']}: {found['num_parameters']:,} parameters, {len(found['layers'])} layers ({kinds})",
        f"up to {found['max_position']:,} tokens; cache blocks are multiples of {found['block_multiple']} tokens",
        "",
        *_groups_table(found["cache_groups"]),
        "",
        *_columns(("CACHE DTYPE", "FORMAT", "BYTES/TOKEN", "WINDOW BYTES/SEQUENCE", "CARRY BYTES/SEQUENCE"), formats),
        "",
        f"a rank of {weights['num_expert_ranks']} has {weights['num_experts_per_rank']} experts of each layer",
        *_ranks_table(weights, weights["dtype"], weights["are_here"]),
        *_drafter_lines(found["drafter"], weights["dtype"]),
    ]
    return "\n".join(lines)


def _drafter_lines(drafter: dict[str, Any] | None, dtype: str) -> list[str]:
    if drafter is None:
        return []
    lines = [
        "",
        f"drafter {drafter['kind']}: {drafter['num_parameters']:,} parameters, {drafter['num_layers']} layers of "
        f"{drafter['num_experts']} experts, {drafter['num_drafts']} tokens at once; not used yet",
        *_groups_table(drafter["cache_groups"]),
    ]
    if "rank_memory_bytes" in drafter:
        lines += ["", *_ranks_table(drafter, dtype, drafter["are_here"])]
    return lines


def _groups_table(groups: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (
            group["name"],
            group["holds"],
            str(len(group["layers"])),
            f"1 / {group['tokens_per_entry']} tokens" if group["rows"] is None else f"ring of {group['rows']}",
            f"{group['bytes_per_entry']:,}",
            group["transfer"],
        )
        for group in groups
    ]
    return _columns(("CACHE GROUP", "HOLDS", "LAYERS", "ENTRIES", "BYTES", "PUSHED"), rows)


def _ranks_table(sizes: dict[str, Any], dtype: str, are_here: bool) -> list[str]:
    source = "in this checkpoint" if are_here else "as published (no weights here)"
    kinds = [(dtype, "rank_memory_bytes"), (source, "rank_stored_bytes")]
    if sizes["rank_memory_fp4_bytes"] != sizes["rank_memory_bytes"]:
        kinds.insert(1, ("with AVX-512 BF16, which reads FP4", "rank_memory_fp4_bytes"))
    rows = [(what, *(f"{sizes[key][part]:,}" for part in ("shared", "experts", "total"))) for what, key in kinds]
    return _columns(("WEIGHTS OF A RANK", "SHARED BYTES", "EXPERT BYTES", "BYTES"), rows)


def _columns(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
