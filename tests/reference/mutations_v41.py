"""Wrong formulas of DeepSeek-V4.1, and the tests that must notice them (`python -m tests.reference.mutations`)."""

from __future__ import annotations

from tests.reference.mutation import SHARED, Mutation

TESTS = ("tests/engine/model_v41/test_parity.py",)

_V41 = "models/deepseek_v41/"
_MIX = "kernels/hyper_connection.py"

MUTATIONS = [
    *SHARED,
    Mutation(
        "entries turn at their last token",
        _V41 + "step.py",
        "step_rope(each.first_positions,",
        "step_rope(each.first_positions + ratio - 1,",
    ),
    Mutation(
        "entries turn at their number", _V41 + "step.py", "step_rope(each.first_positions,", "step_rope(each.groups,"
    ),
    Mutation(
        "compressed layers turn with the window layers' theta",
        _V41 + "model.py",
        "True: frequencies(config.compressed_rope,",
        "True: frequencies(type(config.window_rope)(config.window_rope.theta, config.compressed_rope.yarn),",
    ),
    Mutation(
        "YaRN on window-only layers",
        _V41 + "model.py",
        "False: frequencies(config.window_rope,",
        "False: frequencies(type(config.window_rope)(config.window_rope.theta, config.compressed_rope.yarn),",
    ),
    Mutation(
        "no YaRN on compressed layers",
        _V41 + "model.py",
        "True: frequencies(config.compressed_rope,",
        "True: frequencies(type(config.window_rope)(config.compressed_rope.theta),",
    ),
    Mutation(
        "YaRN's temperature in the softmax scale",
        _V41 + "attention.py",
        "self.scale = config.head_dim**-0.5",
        "self.scale = config.head_dim**-0.5 * 1.2772588722239782**2",
    ),
    Mutation(
        "a site sums by its own pre",
        _MIX,
        "return rms_norm_reference(weighted_sum(pre, streams), norm_weight, rms_eps), post, comb, own_pre",
        "return rms_norm_reference(weighted_sum(own_pre, streams), norm_weight, rms_eps), post, comb, own_pre",
    ),
    Mutation(
        "the end takes the mean of the streams",
        _V41 + "model.py",
        "kernels.weighted_norm(streams[rows], residual.pre[rows],",
        "kernels.weighted_norm(streams[rows], torch.ones_like(residual.pre[rows]),",
    ),
    Mutation(
        "each head of q is normalised",
        _V41 + "attention.py",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, None)\n        kv",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, config.norm_eps)\n        kv",
    ),
    Mutation(
        "index keys come from the rotated entry",
        _V41 + "attention.py",
        "        keys = kernels.linear(entries, compressor.w_key)\n",
        "        kernels.head_norm_rope(entries.unsqueeze(1), rope.cos, rope.sin, None)\n"
        "        keys = kernels.linear(entries, compressor.w_key)\n"
        "        kernels.head_norm_rope(entries.unsqueeze(1), rope.cos, -rope.sin, None)\n",
    ),
    Mutation(
        "layers read the first kv source of all",
        _V41 + "attention.py",
        ".index(config.kv_source(layer)) if self.ratio",
        ".index(config.kv_sources_of(self.ratio)[0]) if self.ratio",
    ),
    Mutation(
        "an open group's earlier tokens are forgotten",
        _V41 + "compressor.py",
        "torch.where(is_here, rows[sources.clamp(min=0)].float(), earlier)",
        "rows[sources.clamp(min=0)].float()",
    ),
    Mutation(
        "Reindex layers ignore candidates",
        _V41 + "attention.py",
        "step.blocks is not None and self.layer",
        "False and self.layer",
    ),
    Mutation(
        "the newest block is no candidate of its own",
        "kernels/indexer.py",
        "best.masked_fill(newest & (visible > 0), torch.inf)",
        "best",
    ),
    Mutation(
        "a block's score is its first entry's",
        "kernels/indexer.py",
        ".view(len(padded), -1, run_size).amax(dim=2)",
        ".view(len(padded), -1, run_size)[:, :, 0]",
    ),
    Mutation(
        "the pad before the sequence is not compressed",
        _V41 + "ngram_hash.py",
        "int(token_map[config.pad_token_id])",
        "int(config.pad_token_id)",
    ),
    Mutation(
        "n-grams end at the step's first token",
        _V41 + "ngram_hash.py",
        "] = previous\n",
        "] = previous.clamp(max=-1)\n",
    ),
    Mutation("hash functions share their rows", _V41 + "ngram_hash.py", " + self._offsets[:, size].unsqueeze(1)", ""),
    Mutation(
        "the gate loses its sign",
        _V41 + "engram.py",
        "torch.copysign(dot.abs().clamp(min=_MIN_DOT).sqrt(), dot)",
        "dot.abs().clamp(min=_MIN_DOT).sqrt()",
    ),
]
