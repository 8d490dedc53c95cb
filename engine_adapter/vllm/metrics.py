"""Seconds and bytes of loads and saves among vLLM's own statistics: its log, `llm.get_metrics()` and its /metrics page."""

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from engine_adapter.vllm.journal import no_numbers

BUCKETS_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class KvdbStats(KVConnectorStats):  # type: ignore[misc]  # without vllm its base is not known
    """The numbers of a `Journal`, of one step or of several."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {**no_numbers()})

    def reset(self) -> None:
        self.data = {**no_numbers()}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = {name: value + other.data[name] for name, value in self.data.items()}
        return self

    def reduce(self) -> dict[str, int | float]:
        load, save = self.data["load_seconds"], self.data["save_seconds"]
        counts = {name: self.data[name] for name in ("load_bytes", "save_bytes", "missed")}
        return {"loads": len(load), "load_seconds": sum(load), "saves": len(save), "save_seconds": sum(save), **counts}

    def is_empty(self) -> bool:
        return not (self.data["load_seconds"] or self.data["save_seconds"] or self.data["missed"])


class KvdbMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # without vllm its base is not known
    """Histograms vllm:kvdb_load_seconds and vllm:kvdb_save_seconds, counters vllm:kvdb_load_bytes, vllm:kvdb_save_bytes and
    vllm:kvdb_missed."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds: dict[str, Any] = {}
        self._bytes: dict[str, Any] = {}
        for what in ("load", "save"):
            seconds = metric_types[Histogram](
                name=f"vllm:kvdb_{what}_seconds",
                documentation=f"Seconds of each {what} of KV between vLLM and kvdb.",
                buckets=BUCKETS_SECONDS,
                labelnames=labelnames,
            )
            nbytes = metric_types[Counter](
                name=f"vllm:kvdb_{what}_bytes",
                documentation=f"Bytes of KV of every {what} between vLLM and kvdb.",
                labelnames=labelnames,
            )
            self._seconds[what] = create_metric_per_engine(seconds, per_engine_labelvalues)
            self._bytes[what] = create_metric_per_engine(nbytes, per_engine_labelvalues)
        missed = metric_types[Counter](
            name="vllm:kvdb_missed",
            documentation="Lookups, loads, saves and answers that requests went without while kvdb was away.",
            labelnames=labelnames,
        )
        self._missed = create_metric_per_engine(missed, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for what in ("load", "save"):
            for seconds in transfer_stats_data[f"{what}_seconds"]:
                self._seconds[what][engine_idx].observe(seconds)
            self._bytes[what][engine_idx].inc(transfer_stats_data[f"{what}_bytes"])
        self._missed[engine_idx].inc(transfer_stats_data["missed"])
