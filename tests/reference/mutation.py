"""A change of one place in the engine that makes a formula wrong; those of formulas that all generations share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "engine" / "headrace_engine"


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str  # below PACKAGE
    old: str
    new: str
    can_be_seen: bool = True


def mutated(mutation: Mutation, text: str) -> str:
    """Raises ValueError unless there is exactly one such place."""
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.what}: {mutation.file} has {text.count(mutation.old)} places {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


_MIX, _ATTENTION = "kernels/hyper_connection.py", "kernels/shared_kv_attention.py"

SHARED = [
    Mutation(
        "rope turns the two halves instead of adjacent pairs",
        "kernels/norm_rope.py",
        ".view(*x.shape[:-1], cos.shape[-1], 2)",
        ".view(*x.shape[:-1], 2, cos.shape[-1]).transpose(-1, -2)",
    ),
    Mutation("output is not turned back", _ATTENTION, "return rotate(out, cos, sin, inverse=True)", "return out"),
    Mutation(
        "eps in post (1e-6 of a number of order 1)",
        _MIX,
        "post = 2 * torch.sigmoid(post * scale[1] + post_base)",
        "post = 2 * torch.sigmoid(post * scale[1] + post_base) + hc_eps",
        can_be_seen=False,
    ),
    Mutation(
        "Sinkhorn starts with rows",
        _MIX,
        "    comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)\n    for",
        "    comb = comb / (comb.sum(dim=-1, keepdim=True) + hc_eps)\n    for",
    ),
    Mutation("mixing matrix not transposed", _MIX, "torch.bmm(comb.transpose(1, 2),", "torch.bmm(comb,"),
    Mutation("no sink", _ATTENTION, "sink = sinks.view(1, -1, 1)", "sink = (sinks - 1e9).view(1, -1, 1)"),
    Mutation("a window without the query", _ATTENTION, "(distance >= 0)", "(distance > 0)"),
    Mutation("a window that is one longer", _ATTENTION, "(distance < window)", "(distance <= window)"),
    Mutation(
        "the bias is in the experts' weights",
        "kernels/routing.py",
        "weights = scores.gather(1, ids)",
        "weights = (scores if bias is None else scores + bias).gather(1, ids)",
    ),
    Mutation(
        "the shared expert is not clamped",
        "kernels/experts.py",
        "_swiglu(F.linear(x, w13), limit)",
        "_swiglu(F.linear(x, w13), 1e9)",
    ),
    Mutation(
        "the gate is clamped from below", "kernels/experts.py", "gate.clamp(max=limit)", "gate.clamp(-limit, limit)"
    ),
    Mutation(
        "index scores without relu",
        "kernels/indexer.py",
        'torch.einsum("qhn,gn->qhg", q.float(), keys).relu_()',
        'torch.einsum("qhn,gn->qhg", q.float(), keys)',
    ),
]
