"""Samples of a metrics page: sums over labels, differences of two looks, quantiles of histograms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, frozenset[tuple[str, str]]]


class Samples:
    """Values by name and labels."""

    def __init__(self, values: Mapping[Key, float]) -> None:
        self._values = dict(values)

    def __sub__(self, earlier: Samples) -> Samples:
        """What came since; samples that were not there before count from zero."""
        return Samples({key: value - earlier._values.get(key, 0.0) for key, value in self._values.items()})

    def total(self, name: str, without: Mapping[str, str] | None = None) -> float:
        """Sum over all labels, but for samples that have one of `without`."""
        left_out = set((without or {}).items())
        return sum(value for (n, labels), value in self._values.items() if n == name and not labels & left_out)

    def quantile(self, name: str, share: float) -> float:
        """Upper bound of the bucket that holds this share of a histogram's observations; 0 if there are none."""
        buckets: defaultdict[float, float] = defaultdict(float)
        for (sample, labels), value in self._values.items():
            if sample == f"{name}_bucket":
                buckets[float(dict(labels)["le"])] += value
        bounds = sorted(buckets)
        if not bounds or not buckets[bounds[-1]]:
            return 0.0
        return next(bound for bound in bounds if buckets[bound] >= share * buckets[bounds[-1]])


def samples_of(text: str) -> Samples:
    """All samples of a page in the Prometheus text format."""
    return Samples(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )
