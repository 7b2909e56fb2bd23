"""DeepSeek-V4.1's text model, formula by formula: one sequence, every position anew, no cache, no batch.

The yardstick of the tests: written from the report alone, sharing nothing with the engine. Weights by published name.
Sections are those of the technical report's architecture chapter as far as named.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.reference.rounding import EXACT, V41Rounding
from tokenizers import Tokenizer

Weights = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]  # text_config


class Reference:
    """`logits(ids)` of one model. token_map: compressed id of each token id; None without engram."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        token_map: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        rounding: V41Rounding | None = None,
    ) -> None:
        self.config, self.dtype, self.rounding = config, dtype, rounding or EXACT
        self.weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.token_map = token_map

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab]: of every position."""
        return self.run(ids)[0]

    @torch.inference_mode()
    def run(self, ids: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(logits [tokens, vocab], the streams [tokens, n, d] that each layer's first site is given)."""
        c, w, r = self.config, self.weights, self.rounding
        streams = w["embed.weight"][list(ids)].unsqueeze(1).repeat(1, c["hc_mult"], 1)  # [t, streams, d]
        pre = torch.zeros(len(ids), c["hc_mult"], dtype=self.dtype)
        pre[:, 0] = 1  # the first site reads the first stream
        shared, entered = Shared(), []
        for layer in range(c["num_hidden_layers"]):
            if layer in (c.get("engram_layer_ids") or []):
                assert self.token_map is not None
                rows = engram_rows(c, self.token_map, ids, layer)
                streams = engram(c, _part(w, f"layers.{layer}.engram."), streams, rows, r)
            entered.append(streams)
            own = _part(w, f"layers.{layer}.")
            for site in ("attn", "ffn"):
                next_pre, post, mixing = hyper_connection(c, own, site, streams)
                x = torch.einsum("ti,tid->td", pre, streams)  # the pre of the site before
                x = rms_norm(x, own[f"{site}_norm.weight"], c["rms_norm_eps"])
                part = _part(own, f"{site}.")
                y = attention(c, part, layer, x, shared, r) if site == "attn" else moe(c, part, x, r)
                streams = post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", mixing, streams)
                pre = next_pre
        x = rms_norm(torch.einsum("ti,tid->td", pre, streams), w["norm.weight"], c["rms_norm_eps"])
        return x @ w["head.weight"].T, entered


class Shared:
    """What layers hand on to those above: entries, index keys, candidates and the choice."""

    entries: torch.Tensor  # [g, head_dim], rotated
    keys: torch.Tensor  # [g, index_dim], rotated
    candidates: list[set[int]] | None = None  # entries by query
    chosen: list[list[int]]  # entries by query


def _part(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


# --- hyper-connections -----------------------------------------------------------------------------------------------


def hyper_connection(
    c: Config, w: Weights, site: str, streams: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [t, n] for the next site, post [t, n], mixing [t, n from, n to])."""
    n, eps = c["hc_mult"], c["hc_eps"]
    fn, base, scale = w[f"hc_{site}_fn"], w[f"hc_{site}_base"], w[f"hc_{site}_scale"]
    z = rms_norm(streams.flatten(1), 1.0, c["rms_norm_eps"]) @ fn.T
    pre = torch.sigmoid(scale[0] * z[:, :n] + base[:n]) + eps
    post = 2 * torch.sigmoid(scale[1] * z[:, n : 2 * n] + base[n : 2 * n])
    a = torch.softmax((scale[2] * z[:, 2 * n :] + base[2 * n :]).view(-1, n, n), dim=2) + eps
    a = a / (a.sum(dim=1, keepdim=True) + eps)  # columns first
    for _ in range(c["hc_sinkhorn_iters"] - 1):
        a = a / (a.sum(dim=2, keepdim=True) + eps)
        a = a / (a.sum(dim=1, keepdim=True) + eps)
    return pre, post, a


# --- rotary positions ------------------------------------------------------------------------------------------------


def frequencies(c: Config, is_compressed: bool) -> list[float]:
    """Angle per position of each pair."""
    dim = c["qk_rope_head_dim"]
    theta = c["compress_rope_theta"] if is_compressed else c["rope_theta"]
    plain = [theta ** (-2 * k / dim) for k in range(dim // 2)]
    if not is_compressed:
        return plain
    yarn = c["rope_scaling"]

    def pair(rotations: float) -> float:
        turns = yarn["original_max_position_embeddings"] / (2 * math.pi * rotations)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = max(math.floor(pair(yarn["beta_fast"])), 0), min(math.ceil(pair(yarn["beta_slow"])), dim - 1)
    ramp = [min(max((k - low) / max(high - low, 1e-3), 0.0), 1.0) for k in range(dim // 2)]
    return [f * (1 - r) + f / yarn["factor"] * r for f, r in zip(plain, ramp, strict=True)]


def rope(c: Config, x: torch.Tensor, positions: torch.Tensor, is_compressed: bool, sign: int = 1) -> torch.Tensor:
    """x [t, ..., n]: the last dims turn, adjacent pairs as complex numbers."""
    angles = sign * positions.double().unsqueeze(1) * torch.tensor(frequencies(c, is_compressed), dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)
    dim = c["qk_rope_head_dim"]
    pairs = torch.view_as_complex(x[..., -dim:].double().unflatten(-1, (-1, 2)).contiguous())
    turn = turn.view(len(x), *[1] * (x.ndim - 2), dim // 2)
    return torch.cat([x[..., :-dim], torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)], dim=-1)


# --- attention -------------------------------------------------------------------------------------------------------


def attention(c: Config, w: Weights, layer: int, x: torch.Tensor, shared: Shared, r: V41Rounding) -> torch.Tensor:
    """x [t, d] normed -> [t, d]. One head of keys that are values too, over a window and the chosen entries."""
    ratio, eps, heads = c["compress_ratios"][layer], c["rms_norm_eps"], c["num_attention_heads"]
    positions = torch.arange(len(x))
    latent = r.input(rms_norm(r.input(x) @ w["wq_a.weight"].T, w["q_norm.weight"], eps))
    q = rope(c, (latent @ w["wq_b.weight"].T).unflatten(1, (heads, -1)), positions, ratio > 0)
    kv = rope(c, rms_norm(r.input(x) @ w["wkv.weight"].T, w["kv_norm.weight"], eps), positions, ratio > 0)
    kv = r.window(kv)
    if layer in c["kv_source_layer_ids"]:
        compress(c, w, ratio, x, shared, r)
    if layer in c["index_source_layer_ids"]:
        choose(c, w, layer, ratio, x, latent, shared, r)
    outputs = []
    for t in range(len(x)):
        keys = kv[max(0, t - c["sliding_window"] + 1) : t + 1]
        if ratio:
            keys = torch.cat([keys, shared.entries[shared.chosen[t]]])
        logits = q[t] @ keys.T / math.sqrt(c["head_dim"])  # [heads, keys]
        with_sink = torch.cat([logits, w["attn_sink"].unsqueeze(1)], dim=1)
        outputs.append(torch.softmax(with_sink, dim=1)[:, :-1] @ keys)
    o = rope(c, torch.stack(outputs), positions, ratio > 0, sign=-1)
    groups = c["o_groups"]
    o = o.reshape(len(x), groups, -1)
    wo_a = w["wo_a.weight"].view(groups, c["o_lora_rank"], -1)
    return r.input(torch.einsum("tgk,grk->tgr", o, wo_a).flatten(1)) @ w["wo_b.weight"].T


def compress(c: Config, w: Weights, ratio: int, x: torch.Tensor, shared: Shared, r: V41Rounding) -> None:
    """Pools each full group of tokens into one entry, and makes an index key of the entry before it is rotated."""
    num = len(x) // ratio
    values = x[: num * ratio] @ w["compressor.wkv.weight"].T
    if ratio > 1:
        gates = x[: num * ratio] @ w["compressor.wgate.weight"].T
        shares = torch.softmax(gates.unflatten(0, (num, ratio)), dim=1)
        values = (shares * values.unflatten(0, (num, ratio))).sum(1)
    latents = rms_norm(values, w["compressor.norm.weight"], c["rms_norm_eps"])
    firsts = torch.arange(num) * ratio
    shared.entries = r.entries(rope(c, latents, firsts, True))
    keys = rms_norm(latents @ w["indexer.wk.weight"].T, w["indexer.k_norm.weight"], c["rms_norm_eps"])
    shared.keys = r.index(rope(c, keys, firsts, True))


def choose(
    c: Config, w: Weights, layer: int, ratio: int, x: torch.Tensor, latent: torch.Tensor, shared: Shared, r: V41Rounding
) -> None:
    """The entries of each query: the best by score, above the candidate source only among its candidates."""
    heads, dim = c["index_n_heads"], c["index_head_dim"]
    q = rope(c, (latent @ w["indexer.wq_b.weight"].T).unflatten(1, (heads, dim)), torch.arange(len(x)), True)
    q = r.index(q)
    weights = (x @ w["indexer.weights_proj.weight"].T) / math.sqrt(heads * dim)
    source = c["candidate_source_layer_id"]
    shared.chosen, candidates = [], []
    for t in range(len(x)):
        visible = (t + 1) // ratio
        scores = (weights[t].unsqueeze(1) * torch.relu(q[t] @ shared.keys[:visible].T)).sum(0).tolist()
        allowed = list(range(visible))
        if layer == source:
            candidates.append(candidate_entries(c, scores))
        elif 0 <= source < layer:
            assert shared.candidates is not None
            allowed = sorted(shared.candidates[t])
        best = sorted(allowed, key=lambda g: -scores[g])[: c["index_topk"]]
        shared.chosen.append(sorted(best))
    if layer == source:
        shared.candidates = candidates


def candidate_entries(c: Config, scores: Sequence[float]) -> set[int]:
    """The entries of the best blocks, the newest entry's always being one of them."""
    size = c["candidate_block_size"]
    blocks = [max(scores[i : i + size]) for i in range(0, len(scores), size)]
    if blocks:
        blocks[-1] = math.inf
    best = sorted(range(len(blocks)), key=lambda b: -blocks[b])[: c["candidate_topk_blocks"]]
    return {g for b in best for g in range(b * size, min((b + 1) * size, len(scores)))}


# --- experts ---------------------------------------------------------------------------------------------------------


def moe(c: Config, w: Weights, x: torch.Tensor, r: V41Rounding = EXACT) -> torch.Tensor:
    scores = torch.sqrt(F.softplus(x @ w["gate.weight"].T))
    x = r.input(x)
    outputs = []
    for t in range(len(x)):
        ids = torch.topk(scores[t] + w["gate.bias"], c["num_experts_per_tok"]).indices
        shares = scores[t, ids] / (scores[t, ids].sum() + 1e-20) * c["routed_scaling_factor"]
        y = expert(c, w, "shared_experts", x[t], 1.0, r)
        for share, i in zip(shares.tolist(), ids.tolist(), strict=True):
            y = y + expert(c, w, f"experts.{i}", x[t], share, r)
        outputs.append(y)
    return torch.stack(outputs)


def expert(c: Config, w: Weights, name: str, x: torch.Tensor, share: float, r: V41Rounding) -> torch.Tensor:
    limit = c["swiglu_limit"]
    gate = F.silu((w[f"{name}.w1.weight"] @ x).clamp(max=limit))
    up = (w[f"{name}.w3.weight"] @ x).clamp(-limit, limit)
    return w[f"{name}.w2.weight"] @ r.input(share * gate * up)


# --- engram ----------------------------------------------------------------------------------------------------------


def engram(c: Config, w: Weights, streams: torch.Tensor, rows: list[list[int]], r: V41Rounding) -> torch.Tensor:
    """Adds to every stream what the table holds of the last n-grams, as far as the stream asks for it."""
    n, d, eps = c["hc_mult"], c["hidden_size"], c["rms_norm_eps"]
    found = w["embed.weight"][torch.tensor(rows)].flatten(1)  # [t, hashes * row_dim]
    *keys, value = (r.input(found) @ w["wkv.weight"].T).split(d, dim=1)
    updated = []
    for s in range(n):
        x = rms_norm(streams[:, s], w["q_weight"][s], eps)
        k = rms_norm(keys[s], w["k_weight"][s], eps)
        dot = (x * k).sum(-1) / math.sqrt(d)
        gate = torch.sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
        updated.append(streams[:, s] + gate.unsqueeze(1) * value)
    return torch.stack(updated, dim=1)


def engram_rows(c: Config, token_map: Sequence[int], ids: Sequence[int], layer: int) -> list[list[int]]:
    """The table rows of each token: for n-grams of 2, 3, .. tokens, for each head."""
    number = c["engram_layer_ids"].index(layer)
    factors, buckets = engram_multipliers(c, layer), engram_primes(c)[number]
    starts, total = [], 0
    for prime in (prime for of_size in buckets for prime in of_size):
        starts.append(total)
        total += prime
    pad, heads = token_map[c["engram_pad_token_id"]], c["engram_n_heads"]
    rows = []
    for t in range(len(ids)):
        mixed, row = token_map[ids[t]] * factors[0], []
        for back in range(1, c["engram_max_ngram_size"]):
            mixed ^= (token_map[ids[t - back]] if t >= back else pad) * factors[back]
            row += [mixed % buckets[back - 1][h] + starts[(back - 1) * heads + h] for h in range(heads)]
        rows.append(row)
    return rows


def engram_multipliers(c: Config, layer: int) -> list[int]:
    bound = max(1, (2**63 - 1) // c["engram_compressed_vocab_size"] // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, c["engram_max_ngram_size"], np.int64)
    return [2 * int(draw) + 1 for draw in draws]


def engram_primes(c: Config) -> list[list[list[int]]]:
    """By engram layer, n-gram size, head: ascending from the base for each size, none used twice."""
    used: set[int] = set()
    primes = []
    for _ in c["engram_layer_ids"]:
        of_layer = []
        for _ in range(2, c["engram_max_ngram_size"] + 1):
            of_size: list[int] = []
            number = c["engram_vocab_size"]
            while len(of_size) < c["engram_n_heads"]:
                if number not in used and all(number % d for d in range(2, math.isqrt(number) + 1)):
                    of_size.append(number)
                    used.add(number)
                number += 1
            of_layer.append(of_size)
        primes.append(of_layer)
    return primes


_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space


def token_map(tokenizer: Tokenizer) -> list[int]:
    """Compressed id of each token id, numbered by first appearance of its normal form."""
    numbers: dict[str, int] = {}
    return [
        numbers.setdefault(normal_form(tokenizer, i), len(numbers))
        for i in range(tokenizer.get_vocab_size(with_added_tokens=True))
    ]


def normal_form(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in text:  # part of a character
        return str(tokenizer.id_to_token(token_id))
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Letter by letter: a Greek word's last sigma is folded like any other.
    folded = "".join(char.lower() for char in folded if unicodedata.category(char) != "Mn")
    folded = re.sub(r"[ \t\r\n]+", " ", folded)
    if folded != " ":
        folded = re.sub(rf"^[{_SPACE}]+|[{_SPACE}]+$", "", folded)
    return folded or text
