"""Single operations against their formulas written out slowly."""

from __future__ import annotations

import math

import pytest
import torch

from headrace_engine.models.deepseek_v4 import attention_ops, ops
from headrace_engine.models.deepseek_v4.config import RopeConfig, Yarn
from headrace_engine.models.deepseek_v4.rope import cos_sin, frequencies


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class TestRope:
    def test_turns_adjacent_pairs_of_the_last_dims_only(self) -> None:
        x = torch.randn(3, 2, 12)
        angles = torch.rand(3, 4)
        turned = ops.rope(x.clone(), angles.cos(), angles.sin())
        assert torch.equal(turned[..., :4], x[..., :4])
        as_complex = torch.view_as_complex(x[..., 4:].reshape(3, 2, 4, 2).contiguous())
        expected = torch.view_as_real(as_complex * torch.polar(torch.ones(3, 1, 4), angles.unsqueeze(1)))
        torch.testing.assert_close(turned[..., 4:].reshape(3, 2, 4, 2), expected)

    def test_inverse_undoes_it(self) -> None:
        x = torch.randn(5, 16)
        cos, sin = cos_sin(torch.tensor([0, 1, 7, 70_000, 1_000_000]), frequencies(RopeConfig(10000.0), 8))
        turned = ops.rope(x.clone(), cos, sin)
        assert not torch.allclose(turned[1:], x[1:])
        torch.testing.assert_close(ops.rope(turned, cos, sin, inverse=True), x, atol=1e-5, rtol=0)

    def test_scores_depend_on_distance_only_far_beyond_the_original_context(self) -> None:
        table = frequencies(RopeConfig(160000.0, Yarn(16.0, 65536, 32.0, 1.0)), 64)
        q, k = torch.randn(1, 64), torch.randn(1, 64)
        scores = []
        for start in (0, 70_000, 900_000):
            positions = torch.tensor([start + 100, start])
            cos, sin = cos_sin(positions, table)
            scores.append(float(ops.rope(q.clone(), cos[:1], sin[:1]) @ ops.rope(k.clone(), cos[1:], sin[1:]).T))
        # fp32 angles carry an error of about position * 6e-8
        assert scores == pytest.approx([scores[0]] * 3, abs=1.0)
        assert scores[1] == pytest.approx(scores[0], abs=0.1)

    def test_yarn_keeps_fast_pairs_and_divides_slow_ones(self) -> None:
        """The published model: pairs up to 15 as they are, from 25 on divided by 16."""
        plain = frequencies(RopeConfig(160000.0), 64)
        scaled = frequencies(RopeConfig(160000.0, Yarn(16.0, 65536, 32.0, 1.0)), 64)
        torch.testing.assert_close(scaled[:16], plain[:16])
        torch.testing.assert_close(scaled[25:], plain[25:] / 16)
        assert bool((scaled[16:25] < plain[16:25]).all())
        assert bool((scaled[16:25] > plain[16:25] / 16).all())


class TestHyperConnection:
    def setup_method(self) -> None:
        torch.manual_seed(1)
        self.streams = torch.randn(5, 4, 8)
        self.fn, self.base, self.scale = torch.randn(24, 32) * 0.3, torch.randn(24), torch.rand(3) + 0.5

    def mix(self, iterations: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ops.hc_mix(self.streams, self.fn, self.base, self.scale, 1e-6, 1e-6, iterations)

    def test_columns_of_the_mixing_matrix_sum_to_one(self) -> None:
        _, _, comb = self.mix()
        torch.testing.assert_close(comb.sum(dim=1), torch.ones(5, 4), atol=1e-5, rtol=0)
        torch.testing.assert_close(comb.sum(dim=2), torch.ones(5, 4), atol=5e-2, rtol=0)

    def test_one_iteration_normalises_columns_of_the_row_softmax(self) -> None:
        _, post, comb = self.mix(iterations=1)
        flat = self.streams.flatten(1)
        z = (flat / (flat.square().mean(1, keepdim=True) + 1e-6).sqrt()) @ self.fn.T
        rows = torch.softmax((z[:, 8:] * self.scale[2] + self.base[8:]).view(5, 4, 4), dim=2) + 1e-6
        torch.testing.assert_close(comb, rows / (rows.sum(dim=1, keepdim=True) + 1e-6))
        torch.testing.assert_close(post, 2 * torch.sigmoid(z[:, 4:8] * self.scale[1] + self.base[4:8]))

    def test_streams_are_mixed_by_the_first_index(self) -> None:
        output, post, comb = torch.randn(5, 8), torch.randn(5, 4), torch.randn(5, 4, 4)
        updated = ops.hc_update(self.streams, output, post, comb)
        expected = [
            [post[t, j] * output[t] + sum(comb[t, i, j] * self.streams[t, i] for i in range(4)) for j in range(4)]
            for t in range(5)
        ]
        torch.testing.assert_close(updated, torch.stack([torch.stack(rows) for rows in expected]))

    def test_the_head_collapses_with_sigmoid_weights(self) -> None:
        fn, base, scale = torch.randn(4, 32), torch.randn(4), torch.tensor([0.7])
        flat = self.streams.flatten(1)
        z = (flat / (flat.square().mean(1, keepdim=True) + 1e-6).sqrt()) @ fn.T
        pre = torch.sigmoid(z * 0.7 + base) + 1e-6
        collapsed = ops.hc_collapse(self.streams, fn, base, scale, 1e-6, 1e-6)
        torch.testing.assert_close(collapsed, (pre.unsqueeze(-1) * self.streams).sum(1))


class TestRouting:
    def test_the_bias_moves_the_choice_but_not_the_weights(self) -> None:
        x, gate = torch.randn(6, 8), torch.randn(5, 8)
        bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0])
        ids, weights = ops.route(x, gate, bias, None, 2, 1.5)
        scores = (1 + (x @ gate.T).exp()).log().sqrt()
        assert bool((ids == 4).any(dim=1).all())
        chosen = scores.gather(1, ids)
        torch.testing.assert_close(weights, 1.5 * chosen / chosen.sum(1, keepdim=True))

    def test_a_hash_layer_takes_its_ids_and_still_weighs_by_score(self) -> None:
        x, gate, forced = torch.randn(3, 8), torch.randn(5, 8), torch.tensor([[0, 3], [4, 1], [2, 2]])
        ids, weights = ops.route(x, gate, None, forced, 2, 1.0)
        assert torch.equal(ids, forced)
        torch.testing.assert_close(weights.sum(1), torch.ones(3))
        torch.testing.assert_close(weights[2], torch.tensor([0.5, 0.5]))


class TestExperts:
    def test_the_gate_is_clamped_from_above_only_and_the_other_half_on_both_sides(self) -> None:
        gate_up = torch.tensor([[50.0, -50.0, 50.0, -50.0]])
        activated = ops.swiglu(gate_up, 10.0)
        silu = [10.0 / (1 + math.exp(-10.0)), -50.0 / (1 + math.exp(50.0))]
        torch.testing.assert_close(activated, torch.tensor([[silu[0] * 10.0, silu[1] * -10.0]]))

    @pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
    def test_rows_in_any_order_and_none_of_negative_experts(self, num_rows: int) -> None:
        rows, weights = torch.randn(num_rows, 16), torch.rand(num_rows)
        ids = torch.randint(-1, 4, (num_rows,))
        w13, w2 = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
        outputs = ops.expert_mlp(rows, ids, weights, w13, w2, 10.0)
        assert outputs.shape == rows.shape
        for row, expert, weight, output in zip(rows, ids.tolist(), weights, outputs, strict=True):
            expected = torch.zeros(16)
            if expert >= 0:
                expected = weight * (w2[expert] @ ops.swiglu((w13[expert] @ row).unsqueeze(0), 10.0).squeeze(0))
            torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


class TestAttention:
    def test_a_query_without_keys_gives_zero(self) -> None:
        """The sink takes all the weight, and it has no value."""
        rows = torch.full((1, 3), -1)
        outputs = attention_ops.attend_rows(
            torch.randn(1, 2, 8), torch.full((4, 8), torch.nan), rows, None, None, torch.zeros(2), 1.0
        )
        assert torch.equal(outputs, torch.zeros(1, 2, 8))

    def test_the_sink_only_shares_the_weight(self) -> None:
        q, keys, sinks = torch.randn(1, 2, 8), torch.randn(5, 8), torch.tensor([0.3, -2.0])
        outputs = attention_ops.attend_rows(q, keys, torch.tensor([[4, 0, 2]]), None, None, sinks, 0.5)
        logits = torch.cat([q[0] @ keys[[4, 0, 2]].T * 0.5, sinks.unsqueeze(1)], dim=1)
        torch.testing.assert_close(outputs[0], torch.softmax(logits, 1)[:, :3] @ keys[[4, 0, 2]])

    @pytest.mark.parametrize("first_position", [0, 3, 50])
    @pytest.mark.parametrize("chosen", [None, 2, 6], ids=["all", "sparse", "some"])
    def test_a_chunk_equals_its_queries_one_by_one(self, first_position: int, chosen: int | None) -> None:
        """Also past the point where a sparse choice is gathered instead of masked."""
        num_queries, window, ratio = 23, 8, 4
        history = min(first_position, window - 1)
        q, keys = torch.randn(num_queries, 2, 16), torch.randn(history + num_queries, 16)
        entries = torch.randn((first_position + num_queries) // ratio, 16)
        sinks = torch.randn(2)
        index_q, index_keys = torch.randn(num_queries, 16, 4), torch.randn(len(entries), 4)
        weights = torch.randn(num_queries, 16)
        selected = None
        if chosen is not None:
            selected = attention_ops.index_chunk(index_q, weights, index_keys, ratio, first_position, chosen)
        outputs = attention_ops.attend_chunk(q, keys, window, entries, ratio, first_position, selected, sinks, 0.25)
        for t in range(num_queries):
            visible = range((first_position + t + 1) // ratio)
            if chosen is not None:
                scores = ((index_q[t] @ index_keys.T).relu() * weights[t].unsqueeze(1)).sum(0)
                visible = sorted(visible, key=lambda g: -float(scores[g]))[:chosen]
            seen = torch.cat([keys[max(0, history + t + 1 - window) : history + t + 1], entries[list(visible)]])
            logits = torch.cat([q[t] @ seen.T * 0.25, sinks.unsqueeze(1)], dim=1)
            torch.testing.assert_close(outputs[t], torch.softmax(logits, 1)[:, :-1] @ seen)

    def test_tiling_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q, keys, entries = torch.randn(40, 2, 16), torch.randn(47, 16), torch.randn(12, 16)
        index_q, weights, index_keys = torch.randn(40, 16, 8), torch.randn(40, 16), torch.randn(12, 8)
        results = []
        for tile_bytes in (2**25, 2**10):
            monkeypatch.setattr(attention_ops, "_TILE_BYTES", tile_bytes)
            selected = attention_ops.index_chunk(index_q, weights, index_keys, 4, 8, 5)
            results.append(attention_ops.attend_chunk(q, keys, 8, entries, 4, 8, selected, torch.zeros(2), 0.25))
        torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(("num_entries", "topk"), [(3, 5), (5, 5), (9, 5)])
def test_the_indexer_chooses_the_best_visible_entries(num_entries: int, topk: int) -> None:
    q, weights, keys = torch.randn(2, 16, 8), torch.randn(2, 16), torch.randn(20, 8)
    rows = torch.full((2, num_entries), -1)
    rows[0] = torch.randperm(20)[:num_entries]
    rows[1, : num_entries - 2] = torch.randperm(20)[: num_entries - 2]
    chosen = attention_ops.index_rows(q, weights, keys, rows, topk)
    for query in range(2):
        valid = [e for e in range(num_entries) if rows[query, e] >= 0]
        scores = {e: float((weights[query] * (q[query] @ keys[rows[query, e]]).relu()).sum()) for e in valid}
        best = sorted(valid, key=lambda e: -scores[e])[:topk]
        assert sorted(e for e in chosen[query].tolist() if e >= 0) == sorted(best)


def test_pooling_leaves_absent_slots_out() -> None:
    values, gates = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    gates[0, :2] = -torch.inf
    pooled = ops.pool(values, gates)
    torch.testing.assert_close(pooled[0], (torch.softmax(gates[0, 2:], 0) * values[0, 2:]).sum(0))
