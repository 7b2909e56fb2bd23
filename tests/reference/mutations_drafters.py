"""Wrong formulas of the drafters, and the tests that must notice them (`python -m tests.reference.mutations`)."""

from __future__ import annotations

from tests.reference.mutation import Mutation

TESTS = ("tests/engine/drafters/test_drafts.py", "tests/engine/drafters/test_loading.py")

_BLOCK, _HEADS, _DSPARK = "kernels/block_attention.py", "models/dspark/heads.py", "models/dspark/drafter.py"
_STAGE, _MTP = "models/dspark/attention.py", "models/deepseek_v4/mtp.py"

MUTATIONS = [
    Mutation(
        "a block is causal",
        _BLOCK,
        "    sink = sinks",
        "    later = torch.ones(size, size).triu(1).bool().unsqueeze(1)\n"
        "    logits[..., window:].masked_fill_(later, -torch.inf)\n    sink = sinks",
    ),
    Mutation(
        "a block does not see itself",
        _BLOCK,
        "    sink = sinks",
        "    logits[..., window:] = -torch.inf\n    sink = sinks",
    ),
    Mutation(
        "a block's window is one shorter",
        _BLOCK,
        "torch.arange(window, 0, -1",
        "torch.arange(window, 0, -1).clamp(max=window - 1",
    ),
    Mutation("a block's output is not turned back", _BLOCK, "cos, sin, inverse=True)", "cos, sin * 0, inverse=True)"),
    Mutation("a block's softmax has no sink", _BLOCK, "sink = sinks.view", "sink = (sinks - 1e9).view"),
    Mutation(
        "a block begins at the last position instead of the next",
        _DSPARK,
        "(blocks.starts.unsqueeze(1) + torch.arange",
        "(blocks.starts.unsqueeze(1) - 1 + torch.arange",
    ),
    Mutation("a block is noise alone", _DSPARK, "        token_ids[:, 0] = anchors\n", ""),
    Mutation(
        "a block's rows all hold the last token",
        _DSPARK,
        "anchors.new_full((len(anchors), size), self.dspark.noise_token_id)",
        "anchors.unsqueeze(1).repeat(1, size)",
    ),
    Mutation(
        "the context's norm has no weights",
        _DSPARK,
        "self._context_norm, eps)",
        "torch.ones_like(self._context_norm), eps)",
    ),
    Mutation(
        "context is the sum of the streams", "models/drafter.py", "streams.mean(dim=1)", "streams.sum(dim=1)", False
    ),
    Mutation("context is the first stream", "models/drafter.py", "streams.mean(dim=1)", "streams[:, 0]"),
    Mutation(
        "V4-0731 reads what enters its target layers",
        "models/deepseek_v4/draft.py",
        "reads_exits=True",
        "reads_exits=False",
    ),
    Mutation(
        "V4.1 reads what leaves its target layers",
        "models/deepseek_v41/draft.py",
        "reads_exits=False",
        "reads_exits=True",
    ),
    Mutation(
        "num_nextn_predict_layers is trusted in V4-0731",
        "models/deepseek_v4/draft.py",
        'positive(raw_config, "n_mtp_layers", _NUM_STAGES)',
        'positive(raw_config, "num_nextn_predict_layers")',
    ),
    Mutation(
        "V4-0731 does not norm heads of q",
        "models/deepseek_v4/load_drafter.py",
        "head_norm_eps=config.norm_eps",
        "head_norm_eps=None",
    ),
    Mutation(
        "V4.1 norms heads of q", "models/deepseek_v41/load_drafter.py", "head_norm_eps=None", "head_norm_eps=1e-20"
    ),
    Mutation(
        "V4.1's first stage reads the sum of the streams",
        "models/residual.py",
        "self.pre[:, 0] = 1",
        "self.pre[:] = 1",
        False,  # a block's streams are equal at first, and a norm follows
    ),
    Mutation(
        "V4.1's drafter has as many experts a token as the model",
        "models/deepseek_v41/draft.py",
        'experts_per_token=positive(text, "dspark_num_experts_per_tok", main.experts_per_token)',
        "experts_per_token=main.experts_per_token",
    ),
    Mutation(
        "the last streams are summed, not collapsed",
        "models/residual.py",
        "return kernels.weighted_sum(weights, streams)",
        "return streams.sum(dim=1)",
    ),
    Mutation(
        "V4.1's last streams are summed, not collapsed",
        "models/residual.py",
        "return kernels.weighted_sum(self.pre, streams)",
        "return streams.sum(dim=1)",
    ),
    Mutation(
        "no transition between drafts",
        _HEADS,
        " + kernels.linear(embedded, self.markov_head, torch.float32)",
        "",
    ),
    Mutation(
        "every transition is from the last token",
        _HEADS,
        "previous = logits.argmax(dim=1)",
        "drawn = logits.argmax(dim=1)",
    ),
    Mutation(
        "confidence is of the normed state",
        _HEADS,
        "hidden = x.view(len(anchors), num_drafts, x.shape[1]).float()",
        "hidden = kernels.rms_norm(x, self.norm, eps).view(len(anchors), num_drafts, x.shape[1]).float()",
    ),
    Mutation(
        "confidence ignores the token before",
        _HEADS,
        "torch.cat([hidden[:, row], embedded.float()], dim=1)",
        "torch.cat([hidden[:, row], embedded.float() * 0], dim=1)",
    ),
    Mutation(
        "context rows turn by another position",
        _STAGE,
        "kernels.write_ring(self._kv(context, rope, eps)",
        "kernels.write_ring(self._kv(context, type(rope)(rope.cos, -rope.sin, rope.frequencies), eps)",
    ),
    Mutation(
        "MTP's two projections are swapped",
        _MTP,
        "kernels.linear(embedded, weights.w_embedding)",
        "kernels.linear(embedded, weights.w_streams)",
    ),
    Mutation(
        "MTP adds the token to the first stream only",
        _MTP,
        "mixed += kernels.linear(embedded, weights.w_embedding).unsqueeze(1)",
        "mixed[:, 0] += kernels.linear(embedded, weights.w_embedding)",
    ),
    Mutation(
        "MTP reads the row's own token instead of the next",
        _MTP,
        "F.embedding(next_ids, weights.embedding)",
        "F.embedding(batch.token_ids, weights.embedding)",
    ),
    Mutation(
        "MTP norms all streams as one",
        _MTP,
        "kernels.rms_norm(streams.reshape(-1, hidden), weights.streams_norm, eps)",
        "kernels.rms_norm(streams.reshape(tokens, -1), weights.streams_norm.repeat(num_streams), eps).view(-1, hidden)",
    ),
    Mutation(
        "MTP does not norm the embedding",
        _MTP,
        "kernels.rms_norm(F.embedding(next_ids, weights.embedding), weights.embedding_norm, eps)",
        "F.embedding(next_ids, weights.embedding) * weights.embedding_norm",
    ),
    Mutation(
        "MTP reads streams one layer too early",
        _MTP,
        "StreamTap([self._num_main_layers]",
        "StreamTap([self._num_main_layers - 1]",
    ),
    Mutation(
        "further MTP drafts stay at the last position",
        _MTP,
        "positions=lengths - 1,",
        "positions=lengths - 1 - number,",
    ),
    Mutation(
        "further MTP drafts overwrite rows that are still seen",
        "models/deepseek_v4/draft.py",
        "rows = config.window + num_drafts - 1",
        "rows = config.window",
    ),
    Mutation(
        "drafts that are not accepted stay in the window",
        _STAGE,
        "        attended = kernels.block_attention(",
        "        for place in range(len(x) // max(len(blocks.starts), 1)):\n"
        "            rows = kv.view(len(blocks.starts), -1, kv.shape[1])[:, place]\n"
        "            ring[blocks.slots, stage, (blocks.starts + place) % ring.shape[2]] = rows\n"
        "        attended = kernels.block_attention(",
    ),
]
