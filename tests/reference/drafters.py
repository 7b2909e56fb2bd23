"""DeepSeek's drafters, formula by formula: one sequence, every position anew, no cache, no batch.

The yardstick of the tests: written from the reports alone, sharing nothing with the engine. Weights by published name;
the main model's residual streams come in as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tests.reference.deepseek_v41 import Config, Weights, hyper_connection, moe, rms_norm, rope


@dataclass
class Drafted:
    logits: torch.Tensor  # [drafts, vocab]
    tokens: list[int]
    confidences: list[float]


class Generation:
    """What the drafters' layers do differently: DeepSeek-V4 here, V4.1 below."""

    def __init__(self, c: Config) -> None:
        self.c = c

    def norm_heads(self, q: torch.Tensor) -> torch.Tensor:
        return rms_norm(q, 1.0, self.c["rms_norm_eps"])

    def start(self, streams: torch.Tensor) -> None: ...

    def site(self, w: Weights, name: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(what the sublayer reads [t, d], post, mixing): by the site's own pre."""
        pre, post, mixing = hyper_connection(self.c, w, name, streams)
        return torch.einsum("ti,tid->td", pre, streams), post, mixing

    def collapse(self, w: Weights, streams: torch.Tensor) -> torch.Tensor:
        """By the head's own weights: [t, d]."""
        z = rms_norm(streams.flatten(1), 1.0, self.c["rms_norm_eps"]) @ w["hc_head_fn"].T
        pre = torch.sigmoid(w["hc_head_scale"] * z + w["hc_head_base"]) + self.c["hc_eps"]
        return torch.einsum("ti,tid->td", pre, streams)


class SinglePassGeneration(Generation):
    """V4.1: no norm of heads; each site reads by the pre of the site before, the first one stream 0."""

    def norm_heads(self, q: torch.Tensor) -> torch.Tensor:
        return q

    def start(self, streams: torch.Tensor) -> None:
        self.pre = torch.zeros(streams.shape[:2], dtype=streams.dtype)
        self.pre[:, 0] = 1

    def site(self, w: Weights, name: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        read = torch.einsum("ti,tid->td", self.pre, streams)
        self.pre, post, mixing = hyper_connection(self.c, w, name, streams)
        return read, post, mixing

    def collapse(self, w: Weights, streams: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ti,tid->td", self.pre, streams)


def layer(
    g: Generation,
    w: Weights,
    streams: torch.Tensor,
    positions: torch.Tensor,
    context: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """A window-only layer: streams [t, n, d] at positions, which see the rows of context [s, d] and their own.

    visible [t, s + t]: the context's first; context is at positions 0 to s - 1.
    """
    c, eps = g.c, g.c["rms_norm_eps"]
    read, post, mixing = g.site(w, "attn", streams)
    x = rms_norm(read, w["attn_norm.weight"], eps)
    attn = {name.removeprefix("attn."): tensor for name, tensor in w.items() if name.startswith("attn.")}
    y = attention(g, attn, x, positions, context, visible)
    streams = post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", mixing, streams)
    read, post, mixing = g.site(w, "ffn", streams)
    ffn = {name.removeprefix("ffn."): tensor for name, tensor in w.items() if name.startswith("ffn.")}
    y = moe(c, ffn, rms_norm(read, w["ffn_norm.weight"], eps))
    return post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", mixing, streams)


def attention(
    g: Generation,
    w: Weights,
    x: torch.Tensor,
    positions: torch.Tensor,
    context: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    c, eps = g.c, g.c["rms_norm_eps"]
    latent = rms_norm(x @ w["wq_a.weight"].T, w["q_norm.weight"], eps)
    q = (latent @ w["wq_b.weight"].T).unflatten(1, (c["num_attention_heads"], -1))
    q = rope(c, g.norm_heads(q), positions, False)
    everyone = torch.cat([torch.arange(len(context)), positions])
    kv = rms_norm(torch.cat([context, x]) @ w["wkv.weight"].T, w["kv_norm.weight"], eps)
    kv = rope(c, kv, everyone, False)
    outputs = []
    for t in range(len(x)):
        keys = kv[visible[t]]
        logits = q[t] @ keys.T / math.sqrt(c["head_dim"])
        with_sink = torch.cat([logits, w["attn_sink"].unsqueeze(1)], dim=1)
        outputs.append(torch.softmax(with_sink, dim=1)[:, :-1] @ keys)
    o = rope(c, torch.stack(outputs), positions, False, sign=-1).reshape(len(x), c["o_groups"], -1)
    wo_a = w["wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
    return torch.einsum("tgk,grk->tgr", o, wo_a).flatten(1) @ w["wo_b.weight"].T


class MtpReference:
    """DeepSeek-V4's MTP layer."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.c, self.g, self.all = config, Generation(config), {n: t.double() for n, t in weights.items()}
        self.w = stage(self.all, 0)

    @torch.inference_mode()
    def run(self, streams: torch.Tensor, next_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [t, vocab] of the token after next_ids, the layer's own streams) of streams [t, n, d]."""
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        embedded = rms_norm(self.all["embed.weight"][list(next_ids)], w["enorm.weight"], eps) @ w["e_proj.weight"].T
        mixed = rms_norm(streams.double(), w["hnorm.weight"], eps) @ w["h_proj.weight"].T + embedded.unsqueeze(1)
        positions = torch.arange(len(mixed))
        distance = positions.unsqueeze(1) - positions
        visible = (distance >= 0) & (distance < c["sliding_window"])
        out = layer(self.g, w, mixed, positions, mixed.new_empty(0, c["hidden_size"]), visible)
        x = rms_norm(self.g.collapse(w, out), w["norm.weight"], eps)
        return x @ self.all["head.weight"].T, out

    def draft(self, streams: torch.Tensor, next_ids: Sequence[int], count: int) -> Drafted:
        """After the last position; from the second draft on the layer reads its own streams of the draft before."""
        streams, next_ids, rows = streams.double(), list(next_ids), []
        for _ in range(count):
            logits, own = self.run(streams, next_ids)
            rows.append(logits[-1])
            streams = torch.cat([streams, own[-1:]])
            next_ids.append(int(logits[-1].argmax()))
        return Drafted(torch.stack(rows), next_ids[-count:], [])


class DsparkReference:
    """DSpark's stages; markov: the published names of the two factors."""

    def __init__(self, generation: Generation, weights: Weights, markov: tuple[str, str], num_stages: int = 3) -> None:
        c = generation.c
        own_experts = {"num_experts_per_tok": c.get("dspark_num_experts_per_tok", c["num_experts_per_tok"])}
        self.g, self.c = generation, {**c, **own_experts}
        self.g.c = self.c
        self.all = {name: tensor.double() for name, tensor in weights.items()}
        self.stages = [stage(self.all, number) for number in range(num_stages)]
        self.markov = [self.stages[-1][name] for name in markov]

    @torch.inference_mode()
    def draft(self, means: torch.Tensor, anchor: int) -> Drafted:
        """means [t, targets * d]: of each target layer's streams at the positions so far; anchor: the token after."""
        c, g, first, last = self.c, self.g, self.stages[0], self.stages[-1]
        eps, size = c["rms_norm_eps"], c["dspark_block_size"]
        context = rms_norm(means.double() @ first["main_proj.weight"].T, first["main_norm.weight"], eps)
        p, positions = len(means) - 1, torch.arange(len(means), len(means) + size)
        ids = [anchor] + [c["dspark_noise_token_id"]] * (size - 1)
        streams = self.all["embed.weight"][ids].unsqueeze(1).repeat(1, c["hc_mult"], 1)
        seen = torch.arange(p + 1) > p - c["sliding_window"]
        visible = torch.cat([seen, torch.ones(size, dtype=torch.bool)]).expand(size, -1)  # not causal
        g.start(streams)
        for w in self.stages:
            streams = layer(g, w, streams, positions, context, visible)
        x = g.collapse(last, streams)
        base = rms_norm(x, last["norm.weight"], eps) @ self.all["head.weight"].T
        embedding, head = self.markov
        drafted = Drafted(base.clone(), [], [])
        for k in range(size):
            transition = embedding[drafted.tokens[-1] if k else anchor]
            drafted.logits[k] += head @ transition
            drafted.tokens.append(int(drafted.logits[k].argmax()))
            weight = last["confidence_head.proj.weight"][0]
            drafted.confidences.append(float(torch.sigmoid(weight @ torch.cat([x[k], transition]))))
        return drafted


def stage(weights: Weights, number: int) -> Weights:
    prefix = f"mtp.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
