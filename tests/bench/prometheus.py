"""Samples of a metrics page: sums over labels, differences of two looks, quantiles of histograms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, frozenset[tuple[str, str]]]


class Samples:
    """Values by name and labels."""

    def __init__(self, values: Mapping[Key, float]) -> None:
        self._values = dict(values)

    def __sub__(self, earlier: Samples) -> Samples:
        """What came since; samples that were not there before count from zero."""
        return Samples({key: value - earlier._values.get(key, 0.0) for key, value in self._values.items()})

    def total(
        self, name: str, within: Mapping[str, Sequence[str]] | None = None, without: Mapping[str, str] | None = None
    ) -> float:
        """Sum over all labels, of samples that have one of the values of each label of `within`, and none of
        `without`."""
        wanted, left_out = (within or {}).items(), set((without or {}).items())
        return sum(
            value
            for (found, labels), value in self._values.items()
            if found == name
            and not labels & left_out
            and all(dict(labels).get(label) in allowed for label, allowed in wanted)
        )

    def quantile(self, name: str, share: float) -> float:
        """The value below which this share of a histogram's observations is, taken to be spread evenly within each
        bucket (as PromQL's histogram_quantile does); 0 if there are none."""
        buckets: defaultdict[float, float] = defaultdict(float)
        for (sample, labels), value in self._values.items():
            if sample == f"{name}_bucket":
                buckets[float(dict(labels)["le"])] += value
        bounds = sorted(buckets)
        if not bounds or not buckets[bounds[-1]]:
            return 0.0
        rank = share * buckets[bounds[-1]]
        lower, below = 0.0, 0.0
        for bound in bounds:
            if buckets[bound] >= rank:
                inside = buckets[bound] - below
                return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / inside
            lower, below = bound, buckets[bound]
        return lower


def samples_of(text: str) -> Samples:
    """All samples of a page in the Prometheus text format."""
    return Samples(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )
