"""What the cache holds after n tokens, against the buffers of transformers' own cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.model.harness import PagedRun, Sequence, assert_close, random_tokens
from transformers import DynamicCache

from headrace_engine.models.deepseek_v4.config import LayerKind
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.protocol import GroupKind


def entries(run: PagedRun, name: str, layer_index: int, sequence: Sequence) -> torch.Tensor:
    """[entries, dim] of a paged group for the sequence's blocks, in order."""
    return run.cache[name][sequence.blocks, layer_index].flatten(0, 1)


def ring(run: PagedRun, name: str, layer_index: int, sequence: Sequence, first: int, end: int) -> torch.Tensor:
    """[end - first, dim] of a state group: the rows of positions first..end-1."""
    rows = run.cache[name][sequence.slot, layer_index]
    return rows[torch.arange(first, end) % rows.shape[0]]


def theirs(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return layer.compressed_kv[name][0], layer.buffer_kv[name][0], layer.buffer_gate[name][0]


@pytest.mark.parametrize("length", [9, 16, 23, 31, 32, 33, 36, 45])
def test_entries_open_rows_and_window_after_n_tokens(
    model: DeepseekV4, reference: torch.nn.Module, length: int
) -> None:
    tokens = random_tokens(length, seed=length)
    run = PagedRun(model)
    sequence = run.sequence(64)
    for start in range(0, length, 5):
        run.step([(sequence, tokens[start : start + 5])])
    cache = DynamicCache(config=reference.config)
    with torch.inference_mode():
        reference(torch.tensor([tokens]), cache=cache, use_cache=True)

    for index, layer in enumerate(model.config.layers_of(LayerKind.HCA)):
        state = cache.layers[layer]
        attention = model.layers[layer].attention
        assert_compressor(run, sequence, length, index, theirs(state, "compressor"), attention.compressor, "hca_kv")
    for index, layer in enumerate(model.config.layers_of(LayerKind.CSA)):
        state = cache.layers[layer]
        attention = model.layers[layer].attention
        for name, compressor, paged in (
            ("compressor", attention.compressor, "csa_kv"),
            ("indexer", attention.index_compressor, "csa_index"),
        ):
            assert_compressor(run, sequence, length, index, theirs(state, name), compressor, paged)
            assert_overlap(run, sequence, length, index, state, name, compressor, paged)
    for layer in range(model.config.num_layers):
        window = cache.layers[layer].keys[0, 0]
        assert_close(ring(run, "window", layer, sequence, length - len(window), length), window)


def carry_name(paged: str) -> str:
    return {"hca_kv": "hca_carry", "csa_kv": "csa_carry", "csa_index": "csa_index_carry"}[paged]


def assert_compressor(
    run: PagedRun,
    sequence: Sequence,
    length: int,
    index: int,
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    compressor: Any,
    paged: str,
) -> None:
    expected_entries, open_values, open_gates = expected
    ratio = compressor.position_bias.shape[0]
    num_closed = length // ratio
    assert len(expected_entries) == num_closed
    ours = entries(run, paged, index, sequence)
    assert_close(ours[:num_closed], expected_entries)
    assert bool(ours[num_closed:].isnan().all()), "an entry beyond the closed ones was written"
    if len(open_values):
        rows = ring(run, carry_name(paged), index, sequence, length - length % ratio, length)
        values, gates = rows.chunk(2, dim=1)
        assert_close(values, open_values)
        assert_close(gates - compressor.position_bias[: length % ratio], open_gates)


def assert_overlap(
    run: PagedRun,
    sequence: Sequence,
    length: int,
    index: int,
    state: Any,
    name: str,
    compressor: Any,
    paged: str,
) -> None:
    """The a-series of the last closed group, which the next entry pools."""
    ratio, dim = compressor.position_bias.shape[0], compressor.norm.shape[0]
    end = length - length % ratio
    rows = ring(run, carry_name(paged), index, sequence, end - ratio, end)
    assert_close(rows[:, :dim], state.overlap_kv[name][0])
    # transformers keeps these gates with their bias
    assert_close(rows[:, 2 * dim : 3 * dim], state.overlap_gate[name][0])


@pytest.mark.parametrize(
    "group", ["window", "csa_kv", "csa_index", "hca_kv", "csa_carry", "csa_index_carry", "hca_carry"]
)
def test_every_group_matters_to_what_follows(model: DeepseekV4, group: str) -> None:
    """Losing any one group at 45 tokens changes the next 12 tokens' logits: nothing of the state is decoration."""
    tokens = random_tokens(60, seed=1)
    outputs = []
    for lost in (False, True):
        run = PagedRun(model)
        sequence = run.sequence(len(tokens))
        run.step([(sequence, tokens[:45])])
        if lost:
            tensor = run.cache[group]
            tensor[sequence.slot if "carry" in group or group == "window" else sequence.blocks] = 0.0
        outputs.append(torch.cat([run.step([(sequence, [token])])[0] for token in tokens[45:57]]))
    assert float((outputs[0] - outputs[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("length", [30, 31, 32, 33])
def test_setting_the_length_back_takes_a_token_back(model: DeepseekV4, length: int) -> None:
    """State is addressed by position: nothing is undone, the other token simply takes the rows of the first."""
    tokens, others = random_tokens(40, seed=2), random_tokens(40, seed=3)
    run = PagedRun(model)
    expected = run.prompt(tokens[:length] + others[length:])[length:]
    sequence = run.sequence(40)
    run.step([(sequence, tokens[:length])])
    run.step([(sequence, tokens[length : length + 1])])
    sequence.length = length
    outputs = [run.step([(sequence, [token])])[0] for token in others[length:]]
    assert_close(torch.cat(outputs), expected)


@pytest.mark.parametrize("shared", [4, 8, 9, 15, 17, 32])
def test_two_heirs_go_on_from_full_blocks_that_they_share_and_copies_of_the_rest(
    model: DeepseekV4, shared: int
) -> None:
    """Other texts behind the same prefix, in one batch, when its donor has ended and others have its slot."""
    tokens, others = random_tokens(50, seed=4), random_tokens(50, seed=5)
    texts = [tokens[:shared] + tokens[shared + 1 : shared + 13], tokens[:shared] + others[:12]]
    run = PagedRun(model)
    expected = [run.prompt(text)[shared:] for text in texts]
    donor, heirs = run.sequence(48), [run.sequence(48) for _ in texts]
    run.step([(donor, tokens[:shared])])
    num_full, num_in_last = divmod(shared, run.block_size)
    for heir in heirs:
        heir.blocks[:num_full] = donor.blocks[:num_full]
        heir.length, heir.token_ids = shared, tokens[:shared]
        for group in model.cache_groups:
            tensor = run.cache[group.name]
            if group.kind is GroupKind.STATE:
                tensor[heir.slot] = tensor[donor.slot]
            elif num_in_last:
                tensor[heir.blocks[num_full]] = tensor[donor.blocks[num_full]]
    for group in model.cache_groups:
        freed = donor.slot if group.kind is GroupKind.STATE else donor.blocks[num_full:]
        run.cache[group.name][freed] = torch.nan
    outputs = [run.step([(h, t[h.length : h.length + 5]) for h, t in zip(heirs, texts, strict=True)])]
    outputs.append(run.step([(h, t[h.length :]) for h, t in zip(heirs, texts, strict=True)]))
    for made, wanted in zip(zip(*outputs, strict=True), expected, strict=True):
        assert_close(torch.cat(made), wanted)
