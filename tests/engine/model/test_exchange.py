"""Expert parallelism: two processes over gloo give what one process with all experts gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.engine.model.exchange_worker import rank_tokens
from tests.engine.model.harness import PagedRun, assert_close

from headrace_engine.ep.alltoall import AllToAllExchange, _pack, _unpack
from headrace_engine.ep.local import LocalExchange, sum_in_order
from headrace_engine.models.deepseek_v4.model import DeepseekV4

REPOSITORY = Path(__file__).parents[3]


def test_two_ranks_with_uneven_and_idle_steps_equal_one(model: DeepseekV4, tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_path)
    module = "tests.engine.model.exchange_worker"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), "2", str(tmp_path)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        logs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(logs)
    for rank in range(2):
        logits = torch.load(tmp_path / f"rank-{rank}.pt")
        # Rows of other ranks share a grouped product with these, which may round differently: close, not bit-equal.
        assert_close(logits, PagedRun(model).prompt(rank_tokens(rank)))


def test_the_local_exchange_weighs_and_sums_each_tokens_experts() -> None:
    hidden = torch.randn(5, 4)
    ids = torch.tensor([[0, 2], [1, 0], [2, 2], [0, 1], [1, 2]])
    weights = torch.rand(5, 2)

    def scale_by_expert(rows: torch.Tensor, experts: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
        return rows * ((experts + 1) * row_weights).unsqueeze(1)

    outputs = LocalExchange().run(hidden, ids, weights, scale_by_expert)
    torch.testing.assert_close(outputs, hidden * ((ids + 1) * weights).sum(1, keepdim=True))
    assert LocalExchange().run(hidden[:0], ids[:0], weights[:0], scale_by_expert).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_a_payload_carries_rows_experts_and_weights_exactly(dtype: torch.dtype, num_rows: int) -> None:
    rows, weights = torch.randn(num_rows, 24).to(dtype), torch.rand(num_rows)
    experts = torch.randint(-1, 300, (num_rows,))
    for sent, arrived in zip((rows, experts, weights), _unpack(_pack(rows, experts, weights), dtype), strict=True):
        assert arrived.dtype == sent.dtype
        assert torch.equal(arrived, sent)


def test_the_sum_is_in_the_order_of_the_choices() -> None:
    terms = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert float(sum_in_order(terms)) == 0.0  # the 1 is lost in 1e8, as it is in this order
    assert float(sum_in_order(terms[:, [0, 2, 1]])) == 1.0


def test_experts_that_do_not_split_are_refused() -> None:
    class Group:
        def size(self) -> int:
            return 3

    with pytest.raises(ValueError, match="8 experts do not split over 3 ranks"):
        AllToAllExchange(Group(), 8)  # type: ignore[arg-type]
