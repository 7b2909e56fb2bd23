"""One call of every kernel, by name, at the sizes of the published models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from headrace_engine.kernels.cases import Random, angles, make_batch
from headrace_engine.kernels.gpu import hyper_connection as hc
from headrace_engine.kernels.gpu import pages
from headrace_engine.kernels.gpu.attention import attention
from headrace_engine.kernels.gpu.experts import Stack, grouped_mlp_contiguous, grouped_mlp_masked
from headrace_engine.kernels.gpu.indexer import index_scores
from headrace_engine.kernels.gpu.records import Pages
from headrace_engine.kv.records import FORMATS, RecordFormat


def _pages(record: RecordFormat | None) -> Pages:
    if record is None:
        return Pages(torch.zeros(2, 2, 64, 512, dtype=torch.bfloat16), 1)
    return Pages(torch.zeros(2, 2, 64 * record.record_bytes, dtype=torch.uint8), 1, record)


def _gather(record: RecordFormat | None) -> Callable[[], object]:
    tables, asked = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    return partial(pages.gather_entries, _pages(record), tables, asked, asked, torch.bfloat16)


def _scatter(record: RecordFormat | None) -> Callable[[], object]:
    tables, asked = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    rows = torch.zeros(16, 512 if record is None else record.dim, dtype=torch.bfloat16)
    return partial(pages.scatter_entries, rows, _pages(record), tables, asked, asked)


def _attention(record: RecordFormat | None, topk: int) -> Callable[[], object]:
    random = Random(torch.bfloat16)
    batch = make_batch(random, [(199, 1)], block_size=256)
    q, kv, ring = random.normal(1, 64, 512), random.normal(1, 512), random.normal(1, 1, 128, 512)
    turn, selected = angles(batch.positions, 32), torch.zeros(1, topk, dtype=torch.int32) if topk else None
    sinks = torch.zeros(64)
    return partial(attention, q, kv, batch, ring, 0, 128, sinks, 512**-0.5, *turn, _pages(record), 4, selected)


def _index(record: RecordFormat | None) -> Callable[[], object]:
    random = Random(torch.bfloat16)
    batch = make_batch(random, [(199, 1)], block_size=256)
    pages = _pages(record) if record else Pages(torch.zeros(2, 2, 64, 128, dtype=torch.bfloat16), 1)
    return partial(index_scores, random.normal(1, 64, 128), random.wide(1, 64), batch, pages, 4, 8)


def _stack(storage: str, rows: int, columns: int) -> Stack:
    if storage == "plain":
        return Stack(torch.zeros(1, rows, columns, dtype=torch.bfloat16))
    if storage == "fp4":
        scale = torch.zeros(1, rows, columns // 32, dtype=torch.uint8)
        return Stack(torch.zeros(1, rows, columns // 2, dtype=torch.uint8), scale.view(torch.float8_e8m0fnu))
    weight, scale = torch.zeros(1, rows, columns), torch.zeros(1, rows // 128, columns // 128, dtype=torch.uint8)
    return Stack(weight.to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def _experts(storage: str, is_masked: bool) -> Callable[[], object]:
    stacks = _stack(storage, 4096, 4096), _stack(storage, 4096, 2048)
    rows, one = torch.zeros(1, 16, 4096, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32)
    if is_masked:
        return partial(grouped_mlp_masked, rows, one, torch.zeros(1, 16), *stacks, 10.0)
    return partial(grouped_mlp_contiguous, rows[0], one, torch.zeros(16), *stacks, 10.0)


def _mix(dim: int) -> Callable[[], object]:
    streams, fn = torch.zeros(1, 4, dim, dtype=torch.bfloat16), torch.zeros(24, 4 * dim)
    sizes = (torch.zeros(24), torch.zeros(3), torch.zeros(dim), torch.zeros(1, 4))
    return partial(hc.single_pass_mix, streams, fn, *sizes, rms_eps=1e-6, hc_eps=1e-6, iterations=20)


def _update() -> Callable[[], object]:
    streams, y = torch.zeros(1, 4, 4096, dtype=torch.bfloat16), torch.zeros(1, 4096, dtype=torch.bfloat16)
    return partial(hc.hyper_connection_update, streams, y, torch.zeros(1, 4), torch.zeros(1, 4, 4))


def _named(record: RecordFormat | None) -> str:
    return "plain" if record is None else record.name


LAUNCHES: dict[str, Callable[[], Callable[[], object]]] = {}
for _record in (None, *FORMATS):
    LAUNCHES[f"gather {_named(_record)}"] = partial(_gather, _record)
    LAUNCHES[f"scatter {_named(_record)}"] = partial(_scatter, _record)
for _record in (None, *FORMATS[:3]):
    LAUNCHES[f"attention {_named(_record)}"] = partial(_attention, _record, 512)
LAUNCHES["attention, all entries"] = partial(_attention, None, 0)
for _record in (None, *FORMATS[3:]):
    LAUNCHES[f"index scores {_named(_record)}"] = partial(_index, _record)
for _storage in ("plain", "fp8", "fp4"):
    LAUNCHES[f"experts {_storage}, masked"] = partial(_experts, _storage, True)
LAUNCHES["experts fp4, contiguous"] = partial(_experts, "fp4", False)
LAUNCHES["hyper-connection mix"] = partial(_mix, 5120)
LAUNCHES["hyper-connection update"] = _update
