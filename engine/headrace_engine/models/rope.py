"""Rotary tables: frequencies of the two rope kinds, and cos/sin at given positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace_engine.models.config_values import RopeConfig, Yarn


def frequencies(config: RopeConfig, rope_dim: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Angle per position of each pair of dims: [rope_dim / 2] fp32."""
    steps = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    plain = 1.0 / config.theta**steps
    if config.yarn is None:
        return plain.to(device)
    ramp = _interpolated_share(config.yarn, config.theta, rope_dim)
    return (plain * (1 - ramp) + plain / config.yarn.factor * ramp).to(device)


@dataclass(frozen=True)
class StepRope:
    """One rope kind at a step's positions: cos, sin [T, rope_dim / 2] and the frequencies they come from, fp32."""

    cos: torch.Tensor
    sin: torch.Tensor
    frequencies: torch.Tensor


def step_rope(positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> StepRope:
    """positions [T]. fp32: at a million positions bf16 angles would mean nothing."""
    angles = positions.float().unsqueeze(1) * inverse_frequencies
    return StepRope(angles.cos(), angles.sin(), inverse_frequencies)


def _interpolated_share(yarn: Yarn, theta: float, rope_dim: int) -> torch.Tensor:
    """How much of each pair is interpolated: 0 for fast pairs, 1 for slow ones, a ramp between (YaRN, section 3.2)."""

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original context."""
        return rope_dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), rope_dim - 1)
    width = high - low if high != low else 0.001  # a ramp of no width is a step
    return ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
