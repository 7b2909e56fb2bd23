"""Fitting a checkpoint's tensors to the names and shapes that a model expects; what families' layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace_engine.models.errors import ModelError

Shape = tuple[int, ...]

_FLOATS = {"F32", "BF16", "F16"}
_MAX_LISTED = 20


@dataclass(frozen=True)
class Stored:
    """What the checkpoint holds of one tensor."""

    name: str  # as stored
    shape: Shape
    dtype: str  # safetensors' name


def match(
    expected: Mapping[str, Shape],
    stored: Iterable[Stored],
    published_name: Callable[[str], str],
    is_ignored: Callable[[str], bool],
) -> dict[str, str]:
    """Published name -> stored name of every expected tensor; those that `is_ignored` (by published name) are left out.

    Raises ModelError listing missing, unexpected, misshapen or quantized tensors by name.
    """
    found: dict[str, str] = {}
    unexpected, misshapen, unreadable = [], [], []
    for item in stored:
        name = published_name(item.name)
        if is_ignored(name):
            continue
        if name not in expected:
            unexpected.append(item.name)
        elif item.dtype not in _FLOATS and not (name.endswith("tid2eid") and item.dtype in ("I32", "I64")):
            unreadable.append(f"{item.name} ({item.dtype})")
        elif item.shape != expected[name]:
            misshapen.append(f"{item.name} {list(item.shape)} instead of {list(expected[name])}")
        found[name] = item.name
    problems = [
        ("quantized or of an unsupported type (supported: float32, bfloat16, float16)", unreadable),
        ("missing", [name for name in expected if name not in found]),
        ("unexpected", unexpected),
        ("of another shape than config.json implies", misshapen),
    ]
    lines = [f"{len(names)} tensors {what}: {_listed(names)}" for what, names in problems if names]
    if lines:
        raise ModelError("the checkpoint does not fit its config.json; " + "; ".join(lines))
    return found


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
