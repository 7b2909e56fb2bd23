"""Each operation against its formula written out slowly, by the compiled kernels and by the reference."""

from __future__ import annotations

import math

import pytest
import torch

from headrace_engine import kernels as ops
from headrace_engine.kernels import build, native
from headrace_engine.kernels.cases import Random, angles, make_batch, num_blocks
from headrace_engine.kernels.norm_rope import rotate


@pytest.fixture(autouse=True, params=["kernels", "reference"])
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if request.param == "reference":
        monkeypatch.setattr(native, "library", lambda: None)
        return
    try:
        loaded = native.load()
    except build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(native, "library", lambda: loaded)


class TestRope:
    def test_turns_adjacent_pairs_of_the_last_dims_only(self) -> None:
        x = torch.randn(3, 2, 12)
        turn = torch.rand(3, 4)
        turned = ops.head_norm_rope(x.clone(), turn.cos(), turn.sin(), None)
        assert torch.equal(turned[..., :4], x[..., :4])
        as_complex = torch.view_as_complex(x[..., 4:].reshape(3, 2, 4, 2).contiguous())
        expected = torch.view_as_real(as_complex * torch.polar(torch.ones(3, 1, 4), turn.unsqueeze(1)))
        torch.testing.assert_close(turned[..., 4:].reshape(3, 2, 4, 2), expected)

    def test_inverse_undoes_it(self) -> None:
        x = torch.randn(5, 1, 16)
        cos, sin = angles(torch.tensor([0, 1, 7, 70_000, 1_000_000]), 4)
        turned = ops.head_norm_rope(x.clone(), cos, sin, None)
        assert not torch.allclose(turned[1:], x[1:])
        torch.testing.assert_close(rotate(turned, cos, sin, inverse=True), x, atol=1e-5, rtol=0)


class TestHyperConnection:
    def setup_method(self) -> None:
        torch.manual_seed(1)
        self.streams = torch.randn(5, 4, 8)
        self.fn, self.base, self.scale = torch.randn(24, 32) * 0.3, torch.randn(24), torch.rand(3) + 0.5

    def mix(self, iterations: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ops.hyper_connection_mix(
            self.streams,
            self.fn,
            self.base,
            self.scale,
            torch.ones(8),
            rms_eps=1e-6,
            hc_eps=1e-6,
            iterations=iterations,
        )

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
        expected = [
            [post[t, j] * output[t] + sum(comb[t, i, j] * self.streams[t, i] for i in range(4)) for j in range(4)]
            for t in range(5)
        ]
        updated = ops.hyper_connection_update(self.streams.clone(), output, post, comb)
        torch.testing.assert_close(updated, torch.stack([torch.stack(rows) for rows in expected]))

    def test_the_head_collapses_with_sigmoid_weights(self) -> None:
        fn, base, scale = torch.randn(4, 32), torch.randn(4), torch.tensor([0.7])
        flat = self.streams.flatten(1)
        z = (flat / (flat.square().mean(1, keepdim=True) + 1e-6).sqrt()) @ fn.T
        pre = torch.sigmoid(z * 0.7 + base) + 1e-6
        normed = ops.hyper_connection_head(self.streams, fn, base, scale, torch.ones(8), rms_eps=1e-6, hc_eps=1e-6)
        collapsed = (pre.unsqueeze(-1) * self.streams).sum(1)
        torch.testing.assert_close(normed, collapsed / (collapsed.square().mean(1, keepdim=True) + 1e-6).sqrt())


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
        x, identity = torch.tensor([[50.0, -50.0]]), torch.eye(2)
        expected = [[10.0 / (1 + math.exp(-10.0)) * 10.0, -50.0 / (1 + math.exp(50.0)) * -10.0]]
        outputs = ops.dense_mlp(x, ops.prepare(torch.cat([identity, identity])), ops.prepare(identity), 10.0)
        torch.testing.assert_close(outputs, torch.tensor(expected))

    @pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
    def test_rows_in_any_order_and_none_of_negative_experts(self, num_rows: int) -> None:
        rows, weights = torch.randn(num_rows, 16), torch.rand(num_rows)
        ids = torch.randint(-1, 4, (num_rows,))
        w13, w2 = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
        outputs = ops.expert_mlp(rows, ids, weights, ops.prepare(w13), ops.prepare(w2), 10.0)
        assert outputs.shape == rows.shape
        for row, expert, weight, output in zip(rows, ids.tolist(), weights, outputs, strict=True):
            expected = torch.zeros(16)
            if expert >= 0:
                gate, up = (w13[expert] @ row).chunk(2)
                gate = gate.clamp(max=10.0)
                expected = weight * (w2[expert] @ (gate * torch.sigmoid(gate) * up.clamp(-10.0, 10.0)))
            torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


class TestAttention:
    @pytest.mark.parametrize("first_position", [0, 3, 50])
    @pytest.mark.parametrize("topk", [None, 2, 60], ids=["all", "sparse", "more than there are"])
    def test_a_chunk_equals_its_queries_one_by_one(self, first_position: int, topk: int | None) -> None:
        num_queries, window, ratio = 23, 8, 4
        random = Random(torch.float32)
        batch = make_batch(random, [(first_position, num_queries)], block_size=8)
        q, kv, sinks = random.normal(num_queries, 2, 16), random.normal(num_queries, 16), random.wide(2)
        ring, cache = random.normal(1, 1, window, 16), random.normal(num_blocks(batch), 1, 2, 16)
        index_q, weights = random.normal(num_queries, 16, 4), random.wide(num_queries, 16)
        index_cache = random.normal(num_blocks(batch), 1, 2, 4)
        selected = None if topk is None else ops.select_entries(index_q, weights, batch, index_cache, 0, ratio, topk)
        cos, sin = torch.ones(num_queries, 2), torch.zeros(num_queries, 2)
        entries = ops.Entries(cache, 0, ratio, selected)
        outputs = ops.attention(q, kv, batch, ring, 0, window, sinks, 0.25, cos, sin, entries)

        rows = [(int(batch.block_tables[0, g // 2]), 0, g % 2) for g in range((first_position + num_queries) // ratio)]
        for t, position in enumerate(range(first_position, first_position + num_queries)):
            visible = list(range((position + 1) // ratio))
            if topk is not None:
                products = [(index_q[t] @ index_cache[rows[g]]).relu() @ weights[t] for g in visible]
                visible = sorted(visible, key=lambda g: -float(products[g]))[:topk]
            seen = [
                kv[p - first_position] if p >= first_position else ring[0, 0, p % window]
                for p in range(max(0, position - window + 1), position + 1)
            ]
            keys = torch.stack([*seen, *(cache[rows[g]] for g in visible)])
            logits = torch.cat([q[t] @ keys.T * 0.25, sinks.unsqueeze(1)], dim=1)
            torch.testing.assert_close(outputs[t], torch.softmax(logits, 1)[:, :-1] @ keys, atol=1e-5, rtol=1e-4)
