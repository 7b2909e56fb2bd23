"""Fitting a checkpoint's tensors to the names and shapes that a model expects; what families' layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace_engine.models.errors import ModelError
from headrace_engine.models.quantize import FP4_ROW, fp8_block

Shape = tuple[int, ...]

_FLOATS = {"F32", "BF16", "F16"}
_INTEGERS = {"I32", "I64"}
PACKED_FP4 = {"I8", "U8"}  # two FP4 numbers a byte
_QUANTIZED = {"F8_E4M3": {"F8_E8M0", "F32"}, "I8": {"F8_E8M0"}, "U8": {"F8_E8M0"}}  # and formats of its scales
_MAX_LISTED = 20


@dataclass(frozen=True)
class Stored:
    """What the checkpoint holds of one tensor."""

    name: str  # as stored
    shape: Shape
    dtype: str  # safetensors' name


@dataclass(frozen=True)
class Source:
    """Where one tensor of the model is in the checkpoint."""

    name: str  # as stored
    shape: Shape  # of the tensor itself: a packed one is stored with fewer columns
    scale: str | None = None  # stored name of a quantized tensor's scales


def match(
    expected: Mapping[str, Shape],
    stored: Iterable[Stored],
    published_name: Callable[[str], str],
    is_ignored: Callable[[str], bool],
) -> dict[str, Source]:
    """Published name -> source of every expected tensor; those that `is_ignored` (by published name) are left out.

    A quantized NAME.weight has its scales beside it as NAME.scale. Raises ModelError listing by name what is missing,
    unexpected, misshapen or in a number format that cannot be read.
    """
    found = {published_name(item.name): item for item in stored}
    found = {name: item for name, item in found.items() if not is_ignored(name)}
    sources: dict[str, Source] = {}
    unreadable, misshapen, scales = [], [], set()
    for name in expected.keys() & found.keys():
        item, scale_name = found[name], name.removesuffix(".weight") + ".scale"
        scale = found.get(scale_name) if item.dtype in _QUANTIZED else None
        if scale is not None:
            scales.add(scale_name)
        if problem := _problem_of_format(item, scale, is_table=name.endswith("tid2eid")):
            unreadable.append(f"{item.name} ({problem})")
        elif problem := _problem_of_shape(expected[name], item, scale):
            misshapen.append(f"{item.name} {problem}")
        else:
            sources[name] = Source(item.name, expected[name], None if scale is None else scale.name)
    problems = [
        ("in a number format that cannot be read", sorted(unreadable)),
        ("missing", [name for name in expected if name not in found]),
        ("unexpected", [item.name for name, item in found.items() if name not in expected and name not in scales]),
        ("of another shape than config.json implies", sorted(misshapen)),
    ]
    lines = [f"{len(names)} tensors {what}: {_listed(names)}" for what, names in problems if names]
    if lines:
        raise ModelError("the checkpoint does not fit its config.json; " + "; ".join(lines))
    return sources


def _problem_of_format(item: Stored, scale: Stored | None, *, is_table: bool) -> str:
    """What is wrong with a tensor's number format, or nothing. `scale`: of a quantized one, if there is one."""
    if is_table:
        return "" if item.dtype in _INTEGERS else f"{item.dtype} instead of integers"
    if item.dtype in _FLOATS:
        return ""
    if item.dtype not in _QUANTIZED:
        return item.dtype
    if scale is None:
        return f"{item.dtype} without a .scale"
    return "" if scale.dtype in _QUANTIZED[item.dtype] else f"{item.dtype} with scales in {scale.dtype}"


def _problem_of_shape(expected: Shape, item: Stored, scale: Stored | None) -> str:
    stored = expected
    if item.dtype in PACKED_FP4:
        if len(expected) != 2 or expected[1] % FP4_ROW:
            return f"is packed FP4, which does not divide {list(expected)} into rows of {FP4_ROW}"
        stored = (expected[0], expected[1] // 2)
    if item.shape != stored:
        return f"{list(item.shape)} instead of {list(stored)}"
    if scale is None:
        return ""
    if item.dtype in PACKED_FP4:
        fits = scale.shape == (expected[0], expected[1] // FP4_ROW)
    else:
        fits = fp8_block(expected, scale.shape) is not None
    return "" if fits else f"{list(item.shape)} with scales {list(scale.shape)}"


def hyper_connection_shapes(num_streams: int, hidden_size: int) -> dict[str, Shape]:
    """Of a layer's two sites."""
    num_mixes = (2 + num_streams) * num_streams
    return {
        f"hc_{site}_{name}": shape
        for site in ("attn", "ffn")
        for name, shape in (("fn", (num_mixes, num_streams * hidden_size)), ("base", (num_mixes,)), ("scale", (3,)))
    }


def expert_shapes(num_experts: int, hidden_size: int, width: int) -> dict[str, Shape]:
    """Of a layer's routed experts and the shared one."""
    shapes: dict[str, Shape] = {}
    for owner in [f"experts.{expert}" for expert in range(num_experts)] + ["shared_experts"]:
        shapes[f"{owner}.w1.weight"] = (width, hidden_size)
        shapes[f"{owner}.w3.weight"] = (width, hidden_size)
        shapes[f"{owner}.w2.weight"] = (hidden_size, width)
    return shapes


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
