"""Hyper-connections around sublayers: how each generation reads its residual streams (written back alike)."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace_engine import kernels
from headrace_engine.models.builder import HyperConnection
from headrace_engine.models.config_values import MixConfig


class Residual(Protocol):
    """One pass through some layers."""

    def read(
        self, streams: torch.Tensor, site: HyperConnection, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(normed input of the site's sublayer [T, hidden] dt, post, comb for kernels.hyper_connection_update)."""
        ...

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """After the last site: one stream [T, hidden] dt, not normed."""
        ...


class DirectResidual:
    """DeepSeek-V4: a site reads by its own weights, and a learned head collapses (report, section 2.2)."""

    def __init__(self, config: MixConfig, head: HyperConnection) -> None:
        self._config, self._head = config, head

    def read(
        self, streams: torch.Tensor, site: HyperConnection, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        return kernels.hyper_connection_mix(
            streams,
            site.fn,
            site.base,
            site.scale,
            norm,
            rms_eps=config.norm_eps,
            hc_eps=config.hc_eps,
            iterations=config.sinkhorn_iterations,
        )

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        config, head = self._config, self._head
        weights = kernels.hyper_connection_head_weights(
            streams, head.fn, head.base, head.scale, rms_eps=config.norm_eps, hc_eps=config.hc_eps
        )
        return kernels.weighted_sum(weights, streams)


class SinglePassResidual:
    """DeepSeek-V4.1: a site reads by what the site before computed, the first one stream 0 (report, section 2.4)."""

    def __init__(self, config: MixConfig, streams: torch.Tensor) -> None:
        """streams [T, N, hidden]: those of this pass."""
        self._config = config
        self.pre = torch.zeros(streams.shape[:2], device=streams.device)  # [T, N] fp32, for the next site
        self.pre[:, 0] = 1

    def read(
        self, streams: torch.Tensor, site: HyperConnection, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        normed, post, comb, self.pre = kernels.single_pass_mix(
            streams,
            site.fn,
            site.base,
            site.scale,
            norm,
            self.pre,
            rms_eps=config.norm_eps,
            hc_eps=config.hc_eps,
            iterations=config.sinkhorn_iterations,
        )
        return normed, post, comb

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        return kernels.weighted_sum(self.pre, streams)
