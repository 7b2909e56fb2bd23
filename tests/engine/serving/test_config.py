"""Flags: what they become, and what is said about those that cannot work."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headrace_engine import cli
from headrace_engine.cli import main
from headrace_engine.config import ConfigError, EngineConfig, add_serve_arguments, config_from
from headrace_engine.core import Role
from headrace_engine.plan import check_lengths, plan_cache


def parse(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from(parser.parse_args(flags))


def test_defaults_are_one_rank_doing_both_phases() -> None:
    config = parse("--tiny", "v4:0")
    assert (config.role, config.data, config.data_local, config.port) == (Role.UNIFIED, 1, 1, 8000)
    assert config.served_model_name == "tiny-v4-0"
    assert not config.has_collectives
    assert config == EngineConfig(model="", tiny="v4:0", served_model_name="tiny-v4-0")


def test_the_model_is_named_after_its_folder(tmp_path: Path) -> None:
    (tmp_path / "Some-Model").mkdir()
    assert parse("--model", str(tmp_path / "Some-Model")).served_model_name == "Some-Model"


def test_ranks_are_numbered_over_pods() -> None:
    config = parse("--tiny", "v4:0", "--data", "4", "--data-local", "2", "--pod-index", "1", "--expert-parallel")
    assert list(config.local_ranks) == [2, 3]
    assert (config.num_pods, config.is_leader, config.has_collectives) == (2, False, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--model DIR or --tiny"),
        (("--tiny", "v4:0", "--model", "."), "either --model DIR or --tiny"),
        (("--tiny", "v4"), "expected FAMILY:SEED"),
        (("--tiny", "v9:0"), "families: v4"),
        (("--tiny", "v4:-1"), "expected FAMILY:SEED"),
        (("--model", "/no/such"), "no such folder"),
        (("--tiny", "v4:0", "--data", "3", "--data-local", "2"), "multiple of --data-local"),
        (("--tiny", "v4:0", "--pod-index", "1"), "pods 0 to 0"),
        (("--tiny", "v4:0", "--data", "0"), "--data 0: must be between"),
        (("--tiny", "v4:0", "--port", "70000"), "--port 70000"),
        (("--tiny", "v4:0", "--port", "29501"), "must differ"),
        (("--tiny", "v4:0", "--max-sequences", "0"), "--max-sequences 0"),
        (("--tiny", "v4:0", "--lease-seconds", "0"), "--lease-seconds 0"),
    ],
)
def test_flags_that_cannot_work(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*flags)


def test_the_command_line_ends_with_2_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "/no/such"]) == 2
    assert "no such folder" in capsys.readouterr().err


def plan(*flags: str, available: int = 10**9, max_position: int = 4096):
    return plan_cache(
        parse("--tiny", "v4:0", *flags),
        max_position=max_position,
        block_multiple=12,
        block_bytes=1000,
        slot_bytes=100,
        available_bytes=available,
    )


def test_blocks_are_256_tokens_or_the_models_next_multiple() -> None:
    assert plan().block_size == 264


def test_blocks_are_as_many_as_can_be_of_use() -> None:
    assert plan("--max-sequences", "3", "--max-model-len", "1000").num_blocks == 3 * 4


def test_blocks_are_as_many_as_fit() -> None:
    result = plan("--max-model-len", "1000", available=100_000)
    assert result.num_bytes <= 0.3 * 100_000
    assert result.num_blocks == (30_000 - 128 * 100) // 1000


def test_a_request_of_full_length_must_fit() -> None:
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        plan(available=1000)


def test_a_decode_rank_keeps_no_snapshots() -> None:
    assert plan("--role", "decode").num_slots == 64
    assert plan("--role", "prefill").num_slots == 128


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--block-size", "16"), "needs a multiple of 12"),
        (("--max-model-len", "5000"), "ends at 4096"),
        (("--num-blocks", "2"), "2 cache blocks of 264 tokens hold no request"),
    ],
)
def test_lengths_are_checked_before_weights_are_read(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_lengths(parse("--tiny", "v4:0", *flags), max_position=4096, block_multiple=12)


@pytest.mark.parametrize("flag", ["--rol=decode", "--expert", "--lease=1"])
def test_flags_are_not_abbreviated(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--tiny", "v4:0", flag])
    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
