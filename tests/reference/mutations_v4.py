"""Wrong formulas of DeepSeek-V4, and the tests that must notice them (`python -m tests.reference.mutations`)."""

from __future__ import annotations

from tests.reference.mutation import SHARED, Mutation

TESTS = ("tests/engine/model/test_layer_kinds.py", "tests/engine/model/test_parity.py")

_V4 = "models/deepseek_v4/"
_COMPRESSOR, _MIX, _INDEXER = "kernels/compressor.py", "kernels/hyper_connection.py", "kernels/indexer.py"
_ANGLES = "float(g * ratio) * frequencies"

MUTATIONS = [
    *SHARED,
    Mutation("entries turn at their last token", _COMPRESSOR, _ANGLES, "float((g + 1) * ratio - 1) * frequencies"),
    Mutation("entries turn at their number", _COMPRESSOR, _ANGLES, "float(g) * frequencies"),
    Mutation(
        "compressed layers turn with the window layers' theta",
        _V4 + "model.py",
        "True: frequencies(config.compressed_rope,",
        "True: frequencies(type(config.window_rope)(config.window_rope.theta, config.compressed_rope.yarn),",
    ),
    Mutation(
        "YaRN on window-only layers",
        _V4 + "model.py",
        "False: frequencies(config.window_rope,",
        "False: frequencies(type(config.window_rope)(config.window_rope.theta, config.compressed_rope.yarn),",
    ),
    Mutation(
        "no YaRN on compressed layers",
        _V4 + "model.py",
        "True: frequencies(config.compressed_rope,",
        "True: frequencies(type(config.window_rope)(config.compressed_rope.theta),",
    ),
    Mutation(
        "YaRN's temperature in the softmax scale",
        _V4 + "attention.py",
        "self.scale = config.head_dim**-0.5",
        "self.scale = config.head_dim**-0.5 * 1.2772588722239782**2",
    ),
    Mutation(
        "a site sums the streams with equal weights",
        _MIX,
        "return rms_norm_reference(weighted_sum(pre, streams), norm_weight, rms_eps), post, comb\n",
        "return rms_norm_reference(weighted_sum(torch.ones_like(pre), streams), norm_weight, rms_eps), post, comb\n",
    ),
    Mutation(
        "the end takes the mean of the streams",
        _MIX,
        "    return rms_norm_reference(weighted_sum(pre, streams), norm_weight, rms_eps)\n\n\ndef _normalised",
        "    return rms_norm_reference(streams.mean(1), norm_weight, rms_eps)\n\n\ndef _normalised",
    ),
    Mutation(
        "heads of q are not normalised",
        _V4 + "attention.py",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, config.norm_eps)",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, None)",
    ),
    Mutation(
        "heads of the index query are normalised",
        _V4 + "attention.py",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, None)",
        "kernels.head_norm_rope(q, rope.cos, rope.sin, 1e-6)",
    ),
    Mutation(
        "the two series of a CSA layer are swapped",
        _COMPRESSOR,
        "[table[:-ratio, :, 0], table[-ratio:, :, 1]]",
        "[table[:-ratio, :, 1], table[-ratio:, :, 0]]",
    ),
    Mutation(
        "a CSA entry does not overlap with the group before",
        _COMPRESSOR,
        "[table[:-ratio, :, 0], table[-ratio:, :, 1]]",
        "[table[-ratio:, :, 1]]",
    ),
    Mutation(
        "the position bias is added to values, not gates",
        _COMPRESSOR,
        "own[:, series * dim :] += position_bias",
        "own[:, : series * dim] += position_bias",
    ),
    Mutation(
        "gates have no position bias", _COMPRESSOR, "own[:, series * dim :] += position_bias", "0 * position_bias"
    ),
    Mutation(
        "the position bias is that of the token's position in the step",
        _COMPRESSOR,
        "position_bias[positions % ratio]",
        "position_bias[(positions - first) % ratio]",
    ),
    Mutation(
        "the softmax is over all channels of a group",
        _COMPRESSOR,
        "torch.softmax(gates, dim=0) * values",
        "torch.softmax(gates.flatten(), dim=0).view(gates.shape) * values",
    ),
    Mutation(
        "an open group's earlier tokens are forgotten",
        _COMPRESSOR,
        "(slots < first).unsqueeze(1), ring",
        "(slots < low).unsqueeze(1), ring",
    ),
    Mutation(
        "a query does not see the entry that it closes",
        "kernels/shared_kv_attention.py",
        "< (positions + 1) // entries.ratio",
        "< positions // entries.ratio",
    ),
    Mutation(
        "a query sees the entry of a group that is open",
        "kernels/shared_kv_attention.py",
        "< (positions + 1) // entries.ratio",
        "< -(-(positions + 1) // entries.ratio)",
    ),
    Mutation(
        "the indexer ignores the weights of its heads",
        _INDEXER,
        "return torch.bmm(weights.unsqueeze(1), products).squeeze(1)",
        "return products.sum(dim=1)",
    ),
    Mutation(
        "hash layers choose experts by score",
        "models/moe.py",
        "forced = None if self.experts_of_token is None else self.experts_of_token[token_ids]",
        "forced = None",
    ),
    Mutation(
        "hash layers weigh their experts equally",
        "kernels/routing.py",
        "weights = scores.gather(1, ids)",
        "weights = scores.gather(1, ids) if forced_ids is None else torch.ones(ids.shape)",
    ),
    Mutation(
        "the experts' weights do not sum to one",
        "kernels/routing.py",
        "weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON) * scaling",
        "weights * scaling",
    ),
]
