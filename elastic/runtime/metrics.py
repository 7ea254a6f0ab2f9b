"""Ray's own metrics: gauges that its agents export to Prometheus as `ray_elastic_*`."""

from __future__ import annotations

from ray.util.metrics import Gauge

from elastic.exchange.link import Snapshot

_RUN = {
    "elastic_version": "Newest durable version of the outer parameters.",
    "elastic_committed_sequences": "Sequences committed.",
    "elastic_bytes_up": "Payload bytes from islands to the synchronizer.",
    "elastic_bytes_down": "Payload bytes from the synchronizer to islands.",
    "elastic_islands": "Islands that take part.",
    "elastic_validation_loss": "Newest validation loss of the outer parameters, nats per token.",
}
_ISLAND = {
    "elastic_island_step": "Inner steps of an island.",
    "elastic_island_loss": "Training loss of its last inner step, nats per token.",
    "elastic_island_tokens_per_s": "Its training speed.",
    "elastic_island_stall_s": "Seconds its inner loop has stood still for the others.",
}


class RayMetrics:
    """Keeps the gauges of one run current."""

    def __init__(self, job: str) -> None:
        self._run = {name: Gauge(name, text, ("job",)) for name, text in _RUN.items()}
        self._island = {name: Gauge(name, text, ("job", "island")) for name, text in _ISLAND.items()}
        self._tags = {"job": job}

    def update(self, view: Snapshot) -> None:
        """Take the figures of one look at the synchronizer."""
        values = {
            "elastic_version": view.version,
            "elastic_committed_sequences": view.committed_sequences,
            "elastic_bytes_up": view.counters["bytes_up"],
            "elastic_bytes_down": view.counters["bytes_down"],
            "elastic_islands": len(view.live),
        }
        if view.validation:
            values["elastic_validation_loss"] = float(str(view.validation["loss"]))
        for name, value in values.items():
            self._run[name].set(value, self._tags)
        for island, beat in view.beats.items():
            tags = {**self._tags, "island": island}
            self._island["elastic_island_step"].set(beat.step, tags)
            self._island["elastic_island_loss"].set(beat.loss, tags)
            self._island["elastic_island_tokens_per_s"].set(beat.tokens_per_s, tags)
            self._island["elastic_island_stall_s"].set(beat.stall_s, tags)
