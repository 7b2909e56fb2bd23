"""V4.1's peer of `make bench-steps`: what its measurements stand for, and that it does the same work."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import pytest
import torch
from tests.bench import steps
from tests.bench.nemo_peer import NemoModel
from tests.bench.report import Results
from tests.bench.step_measures import NEMO, V41, next_token_cell, prefill_cell
from tests.bench.step_peers import compare_with_nemo, measure_beside_nemo, same_best
from tests.bench.stepping import Stepper
from tests.reference import nemo

from headrace_engine import models
from headrace_engine.models.tiny import write_tiny

TOKENS = [20 + (7 * i) % 200 for i in range(60)]


class TakesASecondPerHundredTokens:
    def forward_seconds(self, batch: int, num_tokens: int) -> float:
        return batch * num_tokens / 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-v41")
    write_tiny(path, "v41", 0)
    return path


@pytest.fixture(scope="module")
def stepper(folder: Path) -> Stepper:
    return Stepper(models.load(folder), max_context=256, max_batch=2)


def test_a_forward_of_the_peer_is_a_prefill_and_a_next_token(stepper: Stepper) -> None:
    results = Results()
    measure_beside_nemo(results, stepper, TakesASecondPerHundredTokens(), batches=[2], prompts=[50])
    assert results.median(prefill_cell(50), NEMO) == 100
    assert results.median(next_token_cell(1, 50), NEMO) == 500
    assert results.median(next_token_cell(2, 128), NEMO) == 2560
    assert {name for _, name in results.values} == {NEMO, V41}
    assert all((cell.name, V41) in results.values for cell in results.cells)


def test_ratios_are_of_what_both_were_measured_at(stepper: Stepper) -> None:
    results = Results()
    measure_beside_nemo(results, stepper, TakesASecondPerHundredTokens(), batches=[], prompts=[50])
    results.add(prefill_cell(8192), V41, 1)
    assert steps.ratios(results, V41).keys() == {prefill_cell(50).name, next_token_cell(1, 50).name}


def test_shares_of_equal_best_tokens_by_dtype_and_against_fp32() -> None:
    exact, rounded = torch.eye(4), torch.eye(4)[[0, 1, 2, 2]]
    results = Results()
    compare_with_nemo(results, {"float32": exact, "bfloat16": exact}, {"float32": exact + 1e-6, "bfloat16": rounded})
    found = {(cell, name): value for (cell, name), (value,) in results.values.items()}
    assert found == {
        ("best token as ours, float32", NEMO): 100,
        ("best token as ours, bfloat16", NEMO): 75,
        ("largest difference of a logit, float32", NEMO): pytest.approx(1, rel=0.2),
        ("best token in bfloat16 as in float32", V41): 100,
        ("best token in bfloat16 as in float32", NEMO): 75,
    }


def test_logits_of_other_work_are_not_compared() -> None:
    with pytest.raises(ValueError, match="same work"):
        same_best(torch.zeros(3, 4), torch.zeros(1, 4))


def test_where_the_peer_is_not_installed_the_run_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    results = Results()
    with contextlib.ExitStack() as stack:
        assert steps.open_nemo(stack, argparse.Namespace(skip_nemo=False, threads=1), tmp_path) is None
    steps.note_peers(results, None, None)
    steps.report_ratios(results)
    printed = capsys.readouterr()
    for text in (printed.err, printed.out, results.servers[NEMO]["absent"]):
        assert "make bench-steps-peer" in text


@pytest.mark.slow
@pytest.mark.skipif(not nemo.is_installed(), reason="NeMo AutoModel is not installed")
def test_the_peer_has_our_logits(stepper: Stepper, folder: Path) -> None:
    with NemoModel(folder, "float32", num_threads=1) as peer:
        assert peer.versions["nemo-automodel"] == nemo.VERSION
        assert peer.forward_seconds(2, 30) > 0
        torch.testing.assert_close(peer.logits(TOKENS), stepper.prompt_logits(TOKENS), atol=1e-4, rtol=0)
