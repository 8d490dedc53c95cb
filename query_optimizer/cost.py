"""From bytes and operations to seconds."""

from dataclasses import dataclass

from indexes.base import Cost


@dataclass(frozen=True)
class Machine:
    """What a machine can do."""

    bytes_per_second: float = 25e9
    operations_per_second: float = 200e9
    call_seconds: float = 3e-5
    step_seconds: float = 4e-4

    def exact_seconds(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_second

    def seconds(self, cost: Cost) -> float:
        return max(cost.nbytes / self.bytes_per_second, cost.operations / self.operations_per_second)
