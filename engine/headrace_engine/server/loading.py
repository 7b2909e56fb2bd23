"""How far the ranks of this pod are with loading: what they tell it, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass

_PREFIX = b"loaded "

GAUGES = (
    ("headrace:weights_loaded_bytes", "Bytes of the checkpoint that the rank has read.", "num_loaded"),
    ("headrace:weights_bytes", "Bytes of the checkpoint that the rank reads.", "num_bytes"),
)


@dataclass(frozen=True)
class Loading:
    """A rank's progress, in bytes of the checkpoint."""

    num_loaded: int
    num_bytes: int

    def to_line(self) -> bytes:
        """As a rank writes it to its pod, line by line."""
        return b"%s%d %d\n" % (_PREFIX, self.num_loaded, self.num_bytes)

    @classmethod
    def from_line(cls, line: bytes) -> Loading | None:
        """None: the line says something else."""
        if not line.startswith(_PREFIX) or not line.endswith(b"\n"):
            return None
        num_loaded, num_bytes = line.removeprefix(_PREFIX).split()
        return cls(int(num_loaded), int(num_bytes))

    def state(self) -> dict[str, int]:
        """For /state."""
        return {"weights_loaded_bytes": self.num_loaded, "weights_bytes": self.num_bytes}
