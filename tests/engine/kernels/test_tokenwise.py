"""Norms, rotation, hyper-connections, linears, routing and experts against their references."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.engine.kernels.compare import assert_close

from headrace_engine import kernels as ops
from headrace_engine.kernels import experts, hyper_connection, linears, norm_rope, routing
from headrace_engine.kernels.cases import Random, angles

pytestmark = pytest.mark.usefixtures("kernels")
EPS = 1e-6


@pytest.mark.parametrize(("rows", "dim"), [(0, 8), (1, 8), (1, 256), (5, 511), (200, 512)])
def test_rms_norm(rows: int, dim: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weight = random.normal(rows, dim, scale=3.0), random.wide(dim)
    assert_close(ops.rms_norm(x, weight, EPS), norm_rope.rms_norm_reference(x, weight, EPS), dtype)


def test_rms_norm_of_a_slice_of_wider_rows(dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weight = random.normal(7, 100)[:, 30:62], random.wide(32)
    assert_close(ops.rms_norm(x, weight, EPS), norm_rope.rms_norm_reference(x, weight, EPS), dtype)


def test_rms_norm_of_zeros_is_zero(dtype: torch.dtype) -> None:
    assert ops.rms_norm(torch.zeros(2, 16, dtype=dtype), torch.ones(16), EPS).abs().max() == 0


@pytest.mark.parametrize(("rows", "dim", "half"), [(0, 16, 4), (1, 16, 8), (3, 80, 20), (70, 512, 32)])
def test_rms_norm_rope(rows: int, dim: int, half: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weight = random.normal(rows, dim + 5)[:, :dim], random.wide(dim)
    cos, sin = angles(torch.arange(rows) * 37, half)
    expected = norm_rope.rotate(norm_rope.rms_norm_reference(x, weight, EPS), cos, sin)
    assert_close(ops.rms_norm_rope(x, weight, cos, sin, EPS), expected, dtype)


@pytest.mark.parametrize("eps", [EPS, None])
@pytest.mark.parametrize(("tokens", "heads", "dim", "half"), [(0, 2, 16, 4), (1, 8, 512, 32), (9, 3, 40, 20)])
def test_head_norm_rope(tokens: int, heads: int, dim: int, half: int, eps: float | None, dtype: torch.dtype) -> None:
    q = Random(dtype).normal(tokens, heads, dim, scale=2.0)
    cos, sin = angles(torch.arange(tokens) + 1000, half)
    expected = norm_rope.head_norm_rope_reference(q.clone(), cos, sin, eps)
    assert ops.head_norm_rope(q, cos, sin, eps) is q
    assert_close(q, expected, dtype)


def _hyper_connection(random: Random, streams: int, dim: int, outputs: int, scales: int) -> list[torch.Tensor]:
    fn = random.wide(outputs, streams * dim, scale=(streams * dim) ** -0.5)
    return [fn, random.wide(outputs, scale=0.5), random.wide(scales) + 1, random.wide(dim) + 1]


@pytest.mark.parametrize(("tokens", "streams", "dim"), [(0, 4, 16), (1, 4, 256), (35, 2, 24), (5, 1, 30), (33, 4, 100)])
def test_hyper_connection_mix(tokens: int, streams: int, dim: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weights = (
        random.normal(tokens, streams, dim),
        _hyper_connection(random, streams, dim, (2 + streams) * streams, 3),
    )
    keys = {"rms_eps": EPS, "hc_eps": 1e-6, "iterations": 20}
    normed, post, comb = ops.hyper_connection_mix(x, *weights, **keys)
    expected = hyper_connection.hyper_connection_mix_reference(x, *weights, **keys)
    assert_close(normed, expected[0], dtype)
    assert_close(post, expected[1], torch.float32, factor=4)
    assert_close(comb, expected[2], torch.float32, factor=4)


@pytest.mark.parametrize(("tokens", "streams", "dim"), [(0, 4, 16), (3, 2, 24), (33, 4, 100)])
def test_single_pass_mix_sums_by_the_given_pre_and_returns_its_own(
    tokens: int, streams: int, dim: int, dtype: torch.dtype
) -> None:
    random = Random(dtype)
    x, pre = random.normal(tokens, streams, dim), random.wide(tokens, streams)
    weights = _hyper_connection(random, streams, dim, (2 + streams) * streams, 3)
    keys = {"rms_eps": 1e-20, "hc_eps": 1e-6, "iterations": 20}
    normed, post, comb, own_pre = ops.single_pass_mix(x, *weights, pre, **keys)
    expected = hyper_connection.single_pass_mix_reference(x, *weights, pre, **keys)
    assert_close(normed, expected[0], dtype)
    assert_close(post, expected[1], torch.float32, factor=4)
    assert_close(comb, expected[2], torch.float32, factor=4)
    assert_close(own_pre, expected[3], torch.float32, factor=4)
    again = ops.single_pass_mix(x, *weights, own_pre, **keys)[0]
    assert torch.equal(again, ops.hyper_connection_mix(x, *weights, **keys)[0])


def test_sinkhorn_ends_on_columns_that_sum_to_one() -> None:
    random = Random(torch.float32)
    weights = _hyper_connection(random, 4, 32, 24, 3)
    comb = ops.hyper_connection_mix(random.normal(6, 4, 32), *weights, rms_eps=EPS, hc_eps=1e-6, iterations=20)[2]
    assert torch.allclose(comb.sum(dim=1), torch.ones(6, 4), atol=1e-4)


@pytest.mark.parametrize(("tokens", "streams", "dim"), [(0, 4, 16), (1, 4, 256), (3, 2, 24), (40, 4, 100)])
def test_hyper_connection_update(tokens: int, streams: int, dim: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, y = random.normal(tokens, streams, dim), random.normal(tokens, dim)
    post, comb = random.wide(tokens, streams), random.wide(tokens, streams, streams)
    expected = hyper_connection.hyper_connection_update_reference(x, y, post, comb)
    assert ops.hyper_connection_update(x, y, post, comb) is x
    assert_close(x, expected, dtype)


@pytest.mark.parametrize(("tokens", "streams", "dim"), [(0, 4, 16), (1, 4, 256), (9, 3, 50)])
def test_hyper_connection_head(tokens: int, streams: int, dim: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weights = random.normal(tokens, streams, dim), _hyper_connection(random, streams, dim, streams, 1)
    actual = ops.hyper_connection_head(x, *weights, rms_eps=EPS, hc_eps=1e-6)
    expected = hyper_connection.hyper_connection_head_reference(x, *weights, rms_eps=EPS, hc_eps=1e-6)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(0, 16, 8), (1, 1, 1), (1, 513, 256), (7, 70, 33), (2, 272, 64), (13, 144, 96), (200, 80, 100)],
)
def test_linear(rows: int, columns: int, depth: int, out_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weight = random.normal(rows, depth), random.normal(columns, depth, scale=depth**-0.5)
    actual = ops.linear(x, ops.prepare(weight), out_dtype)
    assert_close(actual, linears.linear_reference(x, weight, out_dtype), dtype)


@pytest.mark.parametrize(
    ("rows", "groups", "columns", "depth"), [(0, 2, 4, 8), (1, 2, 128, 2048), (5, 3, 17, 40), (100, 3, 48, 40)]
)
def test_grouped_linear(rows: int, groups: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weight = random.normal(rows, groups, depth), random.normal(groups, columns, depth, scale=depth**-0.5)
    assert_close(ops.grouped_linear(x, ops.prepare(weight)), linears.grouped_linear_reference(x, weight), dtype)


def test_many_rows_give_the_same_as_few(dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, weight = random.normal(linears.MAX_PLAIN_ROWS + 70, 64), ops.prepare(random.normal(48, 64, scale=0.125))
    few = torch.cat([ops.linear(part, weight) for part in x.split(8)])
    assert_close(ops.linear(x, weight), few, dtype)


@pytest.mark.parametrize("shape", [(32, 6), (3, 16, 8), (17, 4), (16, 5)])
def test_a_prepared_weight_gives_back_the_plain_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = Random(dtype).normal(*shape)
    prepared = ops.prepare(weight)
    assert prepared.shape == weight.shape
    assert torch.equal(prepared.plain(), weight)


@pytest.mark.parametrize("shape", [(3, 32, 48), (2, 5, 7)])
def test_a_stack_filled_matrix_by_matrix_is_the_prepared_one(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight = Random(dtype).normal(*shape)
    stack = ops.WeightStack(torch.empty_like(weight))
    for index in reversed(range(len(weight))):
        stack.write(index, partial(torch.Tensor.copy_, other=weight[index]))
    filled, prepared = stack.weight(), ops.prepare(weight)
    assert filled.packed == prepared.packed
    assert torch.equal(filled.data, prepared.data)


@pytest.mark.parametrize("tokens", [0, 1, 6, 40])
@pytest.mark.parametrize("choice", ["biased", "plain", "forced"])
def test_route(tokens: int, choice: str, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, gate = random.normal(tokens, 48), random.wide(20, 48, scale=0.3)
    bias = random.wide(20, scale=0.5) if choice == "biased" else None
    forced = random.integers(0, 20, tokens, 6) if choice == "forced" else None
    ids, weights = ops.route(x, gate, bias, forced, 6, 1.5)
    expected_ids, expected_weights = routing.route_reference(x, gate, bias, forced, 6, 1.5)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights, torch.float32)


def test_equal_scores_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    ids, weights = ops.route(torch.ones(1, 4, dtype=dtype), torch.zeros(9, 4), None, None, 3, 1.5)
    assert ids.tolist() == [[0, 1, 2]]
    assert torch.allclose(weights, torch.full((1, 3), 0.5))


@pytest.mark.parametrize(
    ("rows", "num_experts", "dim", "width"),
    [(0, 4, 16, 8), (1, 1, 8, 8), (6, 64, 256, 128), (100, 5, 40, 24), (300, 3, 64, 48)],
)
def test_experts(rows: int, num_experts: int, dim: int, width: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, ids = random.normal(rows, dim, scale=3.0), random.integers(-1, num_experts, rows)
    w13, w2 = random.normal(num_experts, 2 * width, dim, scale=dim**-0.5), random.normal(num_experts, dim, width)
    weights = random.wide(rows)
    actual = ops.expert_mlp(x, ids, weights, ops.prepare(w13), ops.prepare(w2), 2.0)
    assert_close(actual, experts.expert_mlp_reference(x, ids, weights, w13, w2, 2.0), dtype)
    assert actual[ids < 0].abs().sum() == 0


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_dense_mlp(rows: int, dtype: torch.dtype) -> None:
    random = Random(dtype)
    x, w13, w2 = random.normal(rows, 48), random.normal(64, 48, scale=0.2), random.normal(48, 32, scale=0.2)
    assert_close(
        ops.dense_mlp(x, ops.prepare(w13), ops.prepare(w2), 2.0), experts.dense_mlp_reference(x, w13, w2, 2.0), dtype
    )


@pytest.mark.parametrize("rows", [0, 6, 300])
def test_experts_that_round_what_w2_reads(rows: int, dtype: torch.dtype) -> None:
    """A number that lies between two may go either way, so outputs are compared as a whole: what differs is less than
    what the rounding changes."""
    random, dim, width = Random(dtype), 64, 48
    x, ids = random.normal(rows, dim), random.integers(0, 3, rows)
    w13, w2 = random.normal(3, 2 * width, dim, scale=dim**-0.5), random.normal(3, dim, width, scale=width**-0.5)
    packed13, packed2, shares = ops.prepare(w13), ops.prepare(w2), random.wide(rows)
    unrounded, expected = (
        experts.expert_mlp_reference(x, ids, shares, w13, w2, 2.0, block).float() for block in (0, 32)
    )
    actual = ops.expert_mlp(x, ids, shares, packed13, packed2, 2.0, 32).float()
    assert float((actual - expected).norm()) <= 0.6 * float((unrounded - expected).norm())
    unrounded, expected = (experts.dense_mlp_reference(x, w13[0], w2[0], 2.0, block).float() for block in (0, 32))
    actual = ops.dense_mlp(x, ops.prepare(w13[0]), ops.prepare(w2[0]), 2.0, 32).float()
    assert float((actual - expected).norm()) <= 0.6 * float((unrounded - expected).norm())


@pytest.mark.parametrize(("tokens", "k", "dim"), [(0, 3, 8), (1, 6, 256), (5, 1, 70), (9, 4, 129)])
def test_sum_choices(tokens: int, k: int, dim: int, dtype: torch.dtype) -> None:
    rows = Random(dtype).normal(tokens, k, dim)
    assert torch.equal(ops.sum_choices(rows), experts.sum_choices_reference(rows))


def test_a_wrong_shape_is_refused_at_the_door() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        ops.linear(torch.zeros(2, 8), ops.Weight(torch.zeros(3, 9)))
    with pytest.raises(ValueError, match="cos and sin"):
        ops.rms_norm_rope(torch.zeros(2, 8), torch.ones(8), torch.zeros(3, 2), torch.zeros(3, 2), EPS)
    with pytest.raises(ValueError, match="do not fit"):
        ops.dense_mlp(torch.zeros(2, 8), ops.Weight(torch.zeros(6, 8)), ops.Weight(torch.zeros(8, 4)), 1.0)
