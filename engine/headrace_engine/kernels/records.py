"""Numbers rounded to the formats of packed records, and the records themselves (formats: kv.records)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from headrace_engine.kernels.native import library_for
from headrace_engine.kv.records import Element, RecordFormat, Scale

_SCALES = {Scale.UE8M0: torch.float8_e8m0fnu, Scale.E4M3: torch.float8_e4m3fn, Scale.FP32: torch.float32}


def round_to_records(x: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    """x [..., dim] dt as it would come back from records of this format, in dt. The input stays as it is."""
    library = library_for(x)
    if x.shape[-1] != record.dim:
        raise ValueError(f"round_to_records: {record.name} has {record.dim} elements, not {x.shape[-1]}")
    if library is None:
        return round_to_records_reference(x, record)
    x = x.contiguous()
    out = torch.empty_like(x)
    library.headrace_round_rows(
        x.dtype is torch.bfloat16, x.data_ptr(), x.numel() // record.dim, *native_format(record), out.data_ptr()
    )
    return out


def round_to_records_reference(x: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    rows = x.reshape(-1, record.dim)
    return decode(*encode(rows, record), record).view(x.shape).to(x.dtype)


def write_records(
    entries: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    items: torch.Tensor,
    numbers: torch.Tensor,
    record: RecordFormat,
) -> None:
    """Puts entries [U, dim] dt into one layer of pages [items, layers, page bytes] uint8: number numbers[u] of the page
    of item items[u], int64 [U] both, no two of them equal."""
    library = library_for(entries)
    if library is None:
        write_records_reference(entries, pages, layer, items, numbers, record)
        return
    entries = entries.contiguous()
    library.headrace_write_records(
        entries.dtype is torch.bfloat16, entries.data_ptr(), _num_rows(entries, items, numbers, record),
        *_native_pages(pages, layer, record), items.data_ptr(), numbers.data_ptr(), *native_format(record),
    )  # fmt: skip


def read_records(
    pages: torch.Tensor,
    layer: int,
    items: torch.Tensor,
    numbers: torch.Tensor,
    record: RecordFormat,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The entries that `write_records` put there, as they come back: [U, dim] dtype."""
    out = torch.empty((len(items), record.dim), dtype=dtype, device=pages.device)
    library = library_for(out)
    if library is None:
        return read_records_reference(pages, layer, items, numbers, record, dtype)
    library.headrace_read_records(
        dtype is torch.bfloat16, *_native_pages(pages, layer, record), _num_rows(out, items, numbers, record),
        items.data_ptr(), numbers.data_ptr(), *native_format(record), out.data_ptr(),
    )  # fmt: skip
    return out


def write_records_reference(
    entries: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    items: torch.Tensor,
    numbers: torch.Tensor,
    record: RecordFormat,
) -> None:
    for part, stored in zip(_parts(pages, layer, record), encode(entries, record), strict=True):
        part[items, numbers] = stored


def read_records_reference(
    pages: torch.Tensor,
    layer: int,
    items: torch.Tensor,
    numbers: torch.Tensor,
    record: RecordFormat,
    dtype: torch.dtype,
) -> torch.Tensor:
    values, scales = (part[items, numbers] for part in _parts(pages, layer, record))
    return decode(values, scales, record).to(dtype)


def _parts(pages: torch.Tensor, layer: int, record: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's elements [items, entries, value_bytes] and scales [items, entries, scale_bytes]."""
    per_page = pages.shape[2] // record.record_bytes
    sizes = [per_page * record.value_bytes, per_page * record.scale_bytes]
    values, scales = torch.split(pages[:, layer], sizes, dim=1)
    num_items = len(pages)
    return (
        values.view(num_items, per_page, record.value_bytes),
        scales.view(num_items, per_page, record.scale_bytes),
    )


def _native_pages(pages: torch.Tensor, layer: int, record: RecordFormat) -> tuple[int, int, int]:
    """(address of the layer's first page, bytes from item to item, entries of a page)."""
    num_layers, page_bytes = pages.shape[1:]
    if not (pages.dtype is torch.uint8 and pages.is_contiguous() and 0 <= layer < num_layers):
        raise ValueError(f"pages {list(pages.shape)} have no layer {layer}, or are no bytes")
    if page_bytes % record.record_bytes:
        raise ValueError(f"a page of {page_bytes} bytes holds no whole number of {record.name} records")
    return pages.data_ptr() + layer * page_bytes, pages.stride(0), page_bytes // record.record_bytes


def _num_rows(entries: torch.Tensor, items: torch.Tensor, numbers: torch.Tensor, record: RecordFormat) -> int:
    shape = (len(items),)
    if not all(x.dtype is torch.int64 and x.is_contiguous() and x.shape == shape for x in (items, numbers)):
        raise ValueError("records: items and numbers must be contiguous int64 of one length")
    if entries.shape != (len(items), record.dim):
        raise ValueError(f"records: {len(items)} entries of {record.dim} elements, not {list(entries.shape)}")
    return len(items)


def native_format(record: RecordFormat) -> tuple[int, int, int, int, int, int, float]:
    """A format as the compiled kernels take it."""
    scale = (Scale.UE8M0, Scale.E4M3, Scale.FP32).index(record.scale)
    padding = record.padding_bytes
    return record.dim, record.plain_dim, record.block, record.element.value, padding, scale, record.smallest


def encode(entries: torch.Tensor, record: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """entries [n, dim] dt -> uint8 elements [n, value_bytes] and scales [n, scale_bytes]; every byte is decided."""
    num_entries, quantized_dim, largest = len(entries), record.quantized_dim, record.element.largest
    padded = F.pad(entries[:, :quantized_dim].float(), (0, -quantized_dim % record.block))
    blocks = padded.view(num_entries, record.num_scales, record.block)
    stored_scales, factors = _scales(blocks.abs().amax(-1), record)
    scaled = (blocks / factors.unsqueeze(-1)).clamp(-largest, largest)
    scaled = scaled.nan_to_num(0.0).flatten(1)[:, :quantized_dim]
    if record.element is Element.E4M3:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        halves = _fp4_codes(scaled)
        codes = halves[:, 0::2] | (halves[:, 1::2] << 4)
    plain = entries[:, quantized_dim:].to(torch.bfloat16).contiguous().view(torch.uint8)
    plain = plain.view(num_entries, 2 * record.plain_dim)
    padding = stored_scales.new_zeros((num_entries, record.padding_bytes))
    return torch.cat([codes, plain], dim=1), torch.cat([stored_scales, padding], dim=1)


def decode(values: torch.Tensor, scales: torch.Tensor, record: RecordFormat) -> torch.Tensor:
    """What `encode` makes, uint8, back to entries [n, dim] fp32."""
    num_entries, quantized_dim = len(values), record.quantized_dim
    factors = _factors(scales[:, : record.scale_bytes - record.padding_bytes].contiguous(), record.scale)
    codes, plain = torch.split(values, [record.value_bytes - 2 * record.plain_dim, 2 * record.plain_dim], dim=1)
    if record.element is Element.E4M3:
        numbers = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        table = fp4_values().to(values.device)
        numbers = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    numbers = numbers * factors.repeat_interleave(record.block, dim=1)[:, :quantized_dim]
    return torch.cat(
        [numbers, plain.contiguous().view(torch.bfloat16).float().view(num_entries, record.plain_dim)], dim=1
    )


def _scales(magnitudes: torch.Tensor, record: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitudes [n, blocks] fp32 -> scales as bytes [n, bytes] uint8, and what those mean, [n, blocks]."""
    wanted = magnitudes.clamp(min=record.smallest) / record.element.largest
    is_finite = torch.isfinite(magnitudes)
    match record.scale:
        case Scale.UE8M0:
            fraction, exponents = torch.frexp(wanted)
            stored = torch.where(is_finite, exponents - (fraction == 0.5).int() + 127, 255).to(torch.uint8)
        case Scale.E4M3:
            stored = torch.where(is_finite, wanted.clamp(max=448.0), torch.nan).to(torch.float8_e4m3fn)
        case Scale.FP32:
            stored = torch.where(is_finite, wanted, torch.nan).clone(memory_format=torch.contiguous_format)
    stored = stored.view(torch.uint8)
    return stored, _factors(stored, record.scale)


def _factors(stored: torch.Tensor, scale: Scale) -> torch.Tensor:
    return stored.view(_SCALES[scale]).float()


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes of e2m1, 0 to 15, uint8: nearest, of two equally near ones the even one."""
    magnitudes = values.abs().contiguous()
    table = fp4_values()[:8].to(values.device)
    middles = (table[1:] + table[:-1]) / 2
    index = torch.bucketize(magnitudes, middles)
    is_tie = (index < len(middles)) & (magnitudes == middles[index.clamp(max=len(middles) - 1)])
    index += is_tie & (index % 2 == 1)
    return (index + 8 * values.signbit()).to(torch.uint8)


@functools.cache
def fp4_values() -> torch.Tensor:
    """[16] fp32, by code; the upper half is the negative one."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return torch.cat([values, -values])
