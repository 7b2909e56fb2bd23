"""DeepSeek-V4.1's bounded replay, formula by formula: one sequence in steps, of which some rows are left out.

Report, on bounded replay. In a step only the last `window` rows run beyond the attention of the last kv source, from
whose entries the layers above live; and after a prefix hit only the last `window` rows before it are run again, for the
raw keys of the window, while entries stay as they are. Where rows were left out, a window begins with the first that
was not. Everything that a step needs of those before is kept by position, in dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tests.reference.deepseek_v41 import (
    Reference,
    Weights,
    candidate_entries,
    engram,
    engram_rows,
    hyper_connection,
    moe,
    rms_norm,
    rope,
)
from tests.reference.rounding import EXACT


class ReplayReference:
    def __init__(self, plain: Reference) -> None:
        self.c, self.w, self.token_map = plain.config, plain.weights, plain.token_map
        num_layers = self.c["num_hidden_layers"]
        self.window: list[dict[int, torch.Tensor]] = [{} for _ in range(num_layers)]  # by layer, position
        self.inputs: list[dict[int, torch.Tensor]] = [{} for _ in range(num_layers)]  # of kv sources' open groups
        self.entries: list[dict[int, torch.Tensor]] = [{} for _ in range(num_layers)]  # by kv source, group
        self.keys: list[dict[int, torch.Tensor]] = [{} for _ in range(num_layers)]

    def forget_windows(self) -> None:
        """What a prefix hit does not bring back."""
        self.window = [{} for _ in self.window]

    @torch.inference_mode()
    def step(self, ids: Sequence[int], first: int, *, num_replayed: int = 0) -> dict[int, torch.Tensor]:
        """Runs positions first to the end of ids, of which num_replayed have entries: position -> logits."""
        c, w = self.c, self.w
        span = c["sliding_window"]
        rows = list(range(first, len(ids)))
        lowest = first if num_replayed else 0  # that a window shows
        kept = rows[-span:]
        streams = w["embed.weight"][[ids[p] for p in rows]].unsqueeze(1).repeat(1, c["hc_mult"], 1)
        pre = torch.zeros(streams.shape[:2], dtype=streams.dtype)
        pre[:, 0] = 1
        for layer in range(c["num_hidden_layers"]):
            own = _part(w, f"layers.{layer}.")
            if layer in (c.get("engram_layer_ids") or []):
                assert self.token_map is not None
                found = engram_rows(c, self.token_map, ids, layer)
                streams = engram(c, _part(own, "engram."), streams, [found[p] for p in rows], EXACT)
            next_pre, post, mixing = hyper_connection(c, own, "attn", streams)
            x = rms_norm(torch.einsum("ti,tid->td", pre, streams), own["attn_norm.weight"], c["rms_norm_eps"])
            y = self._attention(_part(own, "attn."), layer, x, rows, lowest, first + num_replayed)
            streams = post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", mixing, streams)
            pre = next_pre
            if layer == max(c["kv_source_layer_ids"]) and kept != rows:
                streams, pre = streams[-len(kept) :], pre[-len(kept) :]
                self.chosen, self.candidates = self.chosen[-len(kept) :], self.candidates[-len(kept) :]
                rows, lowest = kept, kept[0]
            next_pre, post, mixing = hyper_connection(c, own, "ffn", streams)
            x = rms_norm(torch.einsum("ti,tid->td", pre, streams), own["ffn_norm.weight"], c["rms_norm_eps"])
            y = moe(c, _part(own, "ffn."), x)
            streams = post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", mixing, streams)
            pre = next_pre
        x = rms_norm(torch.einsum("ti,tid->td", pre, streams), w["norm.weight"], c["rms_norm_eps"])
        return dict(zip(rows, x @ w["head.weight"].T, strict=True))

    def _attention(
        self, w: Weights, layer: int, x: torch.Tensor, rows: list[int], lowest: int, first_new: int
    ) -> torch.Tensor:
        c, eps = self.c, self.c["rms_norm_eps"]
        ratio, positions = c["compress_ratios"][layer], torch.tensor(rows)
        latent = rms_norm(x @ w["wq_a.weight"].T, w["q_norm.weight"], eps)
        q = (latent @ w["wq_b.weight"].T).unflatten(1, (c["num_attention_heads"], -1))
        q = rope(c, q, positions, ratio > 0)
        kv = rope(c, rms_norm(x @ w["wkv.weight"].T, w["kv_norm.weight"], eps), positions, ratio > 0)
        self.window[layer].update(zip(rows, kv, strict=True))
        if layer in c["kv_source_layer_ids"]:
            self._compress(w, layer, ratio, x, rows, first_new)
        source = max((s for s in c["kv_source_layer_ids"] if s <= layer), default=-1)
        if layer in c["index_source_layer_ids"]:
            self._choose(w, layer, source, ratio, x, latent, rows)
        outputs = []
        for t, p in enumerate(rows):
            seen = [self.window[layer][s] for s in range(max(lowest, p - c["sliding_window"] + 1), p + 1)]
            if ratio:
                seen += [self.entries[source][g] for g in self.chosen[t]]
            keys = torch.stack(seen)
            logits = torch.cat([q[t] @ keys.T / math.sqrt(c["head_dim"]), w["attn_sink"].unsqueeze(1)], dim=1)
            outputs.append(torch.softmax(logits, dim=1)[:, :-1] @ keys)
        o = rope(c, torch.stack(outputs), positions, ratio > 0, sign=-1).reshape(len(x), c["o_groups"], -1)
        wo_a = w["wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
        return torch.einsum("tgk,grk->tgr", o, wo_a).flatten(1) @ w["wo_b.weight"].T

    def _compress(self, w: Weights, layer: int, ratio: int, x: torch.Tensor, rows: list[int], first_new: int) -> None:
        """Entries of the groups that end in a new row; those that end in a replayed one are there."""
        c, inputs = self.c, self.inputs[layer]
        inputs.update(zip(rows, x, strict=True))
        for p in rows:
            if p < first_new or (p + 1) % ratio:
                continue
            g = p // ratio
            group = torch.stack([inputs[s] for s in range(g * ratio, p + 1)])
            values = group @ w["compressor.wkv.weight"].T
            if ratio > 1:
                values = torch.softmax(group @ w["compressor.wgate.weight"].T, dim=0) * values
            latent = rms_norm(values.sum(0, keepdim=True), w["compressor.norm.weight"], c["rms_norm_eps"])
            key = rms_norm(latent @ w["indexer.wk.weight"].T, w["indexer.k_norm.weight"], c["rms_norm_eps"])
            at = torch.tensor([g * ratio])
            self.entries[layer][g], self.keys[layer][g] = rope(c, latent, at, True)[0], rope(c, key, at, True)[0]

    def _choose(
        self, w: Weights, layer: int, source: int, ratio: int, x: torch.Tensor, latent: torch.Tensor, rows: list[int]
    ) -> None:
        c = self.c
        heads, dim = c["index_n_heads"], c["index_head_dim"]
        q = rope(c, (latent @ w["indexer.wq_b.weight"].T).unflatten(1, (heads, dim)), torch.tensor(rows), True)
        weights = (x @ w["indexer.weights_proj.weight"].T) / math.sqrt(heads * dim)
        marker, chosen, candidates = c["candidate_source_layer_id"], [], []
        for t, p in enumerate(rows):
            keys = torch.stack([self.keys[source][g] for g in range((p + 1) // ratio)]) if p + 1 >= ratio else None
            scores = [] if keys is None else (weights[t].unsqueeze(1) * torch.relu(q[t] @ keys.T)).sum(0).tolist()
            candidates.append(candidate_entries(c, scores) if layer == marker else set())
            allowed = sorted(self.candidates[t]) if 0 <= marker < layer else list(range(len(scores)))
            chosen.append(sorted(sorted(allowed, key=lambda g: -scores[g])[: c["index_topk"]]))
        self.chosen = chosen
        if layer <= marker or marker < 0:
            self.candidates = candidates


def _part(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
