"""What the config.json files of different families have in common: checked values, rotary settings. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_engine.models.errors import ModelError

# Variants that no published model uses; serving one of them as if it were the default would be silently wrong.
_REQUIRED: dict[str, Any] = {
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}


class MoEConfig(Protocol):
    """What a mixture of experts reads of a family's configuration."""

    @property
    def experts_per_token(self) -> int: ...
    @property
    def routed_scaling(self) -> float: ...
    @property
    def swiglu_limit(self) -> float: ...


class MixConfig(Protocol):
    """What hyper-connections read of a family's configuration."""

    @property
    def norm_eps(self) -> float: ...
    @property
    def hc_eps(self) -> float: ...
    @property
    def sinkhorn_iterations(self) -> int: ...


@dataclass(frozen=True)
class Yarn:
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    yarn: Yarn | None = None


def check_variants(config: Mapping[str, Any]) -> None:
    """Raises ModelError for a value that means another computation than ours."""
    for key, wanted in _REQUIRED.items():
        if key in config and config[key] != wanted:
            raise ModelError(f"config.json: {key} = {config[key]!r} is not supported (supported: {wanted!r})")


def check_quantization(value: object) -> None:
    """config.json's `quantization_config`; how each tensor is stored, the tensors themselves say (`names.match`).

    Raises ModelError unless it is absent or FP8 as DeepSeek publishes it: e4m3 with block scales, experts perhaps FP4.
    """
    if value is None:
        return
    if not isinstance(value, dict):
        raise ModelError(f"config.json: quantization_config must be an object, got {value!r}")
    for key, wanted in (("quant_method", "fp8"), ("fmt", "e4m3")):
        if value.get(key, wanted) != wanted:
            raise ModelError(
                f"config.json: quantization_config.{key} = {value[key]!r} is not supported (supported: {wanted!r})"
            )


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be a number, got {value!r}")
    return float(value)


def yarn(parameters: Mapping[str, Any]) -> Yarn | None:
    """The YaRN settings of a rope_scaling or rope_parameters object; None for the plain rope."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ModelError(f"config.json: rope type {kind!r} is not supported (supported: 'default', 'yarn')")
    return Yarn(
        factor=number(parameters, "factor"),
        original_max_position=positive(parameters, "original_max_position_embeddings"),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
    )


def weights_dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    if name not in ("float32", "bfloat16"):
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: 'float32', 'bfloat16')")
    return str(name)
