"""Metrics in other people's tools: TensorBoard files in the run folder, and Weights & Biases.

Both are listeners of an `EventLog`. Metrics of the outer parameters have committed tokens as x axis,
which never goes back. Metrics of an island have its inner step: steps that are repeated after a crash
replace the older ones in TensorBoard and carry another `generation` in Weights & Biases.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.base.errors import ConfigError
from elastic.views.event_log import Event
from elastic.views.format import integer, number
from elastic.views.progress import newest

if TYPE_CHECKING:
    from elastic.state.storage import Storage

OUTER_METRICS: dict[str, str] = {
    "validation/loss": "Validation loss of the outer parameters, nats per token.",
    "validation/nats_per_byte": "The same per byte of text, comparable between tokenizers.",
    "outer/version": "Version of the outer parameters.",
    "outer/delta_norm": "Norm of the merged update of an outer step.",
    "outer/merge_s": "Seconds to merge an outer step and make it durable.",
    "outer/committed_sequences": "Sequences committed so far.",
    "traffic/bytes_up": "Bytes from islands to the synchronizer so far.",
    "traffic/bytes_down": "Bytes from the synchronizer to islands so far.",
}
"""Metrics whose x axis is the run's committed tokens."""

ISLAND_METRICS: dict[str, str] = {
    "inner/loss": "Training loss of the island's last batch, nats per token.",
    "inner/lr": "Learning rate.",
    "inner/grad_norm": "Norm of the gradient before clipping.",
    "inner/tokens_per_s": "Tokens per second of the island.",
    "inner/stall_s": "Seconds the inner loop has waited for the exchange.",
}
"""Metrics of one island, whose x axis is its inner step."""


@dataclass(frozen=True)
class Point:
    """Values of one moment. `island` is None for the outer parameters; `x` is tokens or inner steps."""

    island: str | None
    generation: int
    x: int
    wall_time: float
    values: Mapping[str, float]


class Metrics:
    """Turns events into points. Keeps what a later event needs: which version had how many tokens."""

    def __init__(self) -> None:
        self._tokens = 0
        self._tokens_of: dict[int, int] = {}
        self._generation: dict[str, int] = {}

    def points(self, event: Event) -> list[Point]:
        """Points of the event: none or one; numbers that are missing are left out."""
        kind = event["kind"]
        if kind == "outer_step":
            self._tokens = integer(event["committed_tokens"], self._tokens)
            version = newest(event["version"]) or 0
            self._tokens_of[version] = self._tokens
            self._tokens_of.pop(version - 1000, None)
            fields = ("version", "delta_norm", "merge_s", "committed_sequences")
            names = {f"outer/{name}": name for name in fields}
            names |= {f"traffic/{name}": name for name in ("bytes_up", "bytes_down")}
            return self._point(event, None, self._tokens, names)
        if kind == "validated":
            x = self._tokens_of.get(newest(event["version"]) or 0, self._tokens)
            return self._point(event, None, x, {f"validation/{n}": n for n in ("loss", "nats_per_byte")})
        if kind == "island_joined":
            self._generation[str(event["island"])] = integer(event["generation"])
        if kind == "island_progress":
            if integer(event["generation"]) < self._generation.get(str(event["island"]), 0):
                return []  # a late word of an incarnation that is over
            names = {name: name.split("/")[1] for name in ISLAND_METRICS}
            return self._point(event, str(event["island"]), integer(event["step"]), names)
        return []

    @staticmethod
    def _point(event: Event, island: str | None, x: int, names: Mapping[str, str]) -> list[Point]:
        values = {name: number(event.get(field)) for name, field in names.items()}
        known = {name: value for name, value in values.items() if value is not None}
        return [Point(island, integer(event.get("generation")), x, number(event["time"]) or 0.0, known)]


class TensorBoardSink:
    """Writes `tensorboard/outer` and `tensorboard/islands/<name>`.

    In a bucket the files grow in a local folder and are uploaded by `close`. When an island continues
    from an earlier step, TensorBoard is told to forget its later ones.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._upload = not storage.is_local
        folder = storage.path("tensorboard")
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-tb-")) if folder is None else Path(folder)
        self._metrics = Metrics()
        self._writers: dict[str, Any] = {}
        self._generations: dict[str, int] = {}
        self._suffix = ""

    def __call__(self, event: Event) -> None:
        """Take the next event."""
        kind = event["kind"]
        if kind == "run_started":
            self._suffix = f".a{integer(event['attempt'])}"
        elif kind == "island_joined":
            self._begin(
                str(event["island"]), integer(event["generation"]), integer(event["resumed_step"]) + 1
            )
        for point in self._metrics.points(event):
            name = "outer" if point.island is None else f"islands/{point.island}"
            if point.island is None and name not in self._writers:
                self._open(name, self._suffix, None)
            elif point.island is not None and point.generation > self._generations.get(point.island, -1):
                self._begin(point.island, point.generation, point.x)  # nobody told us that it joined
            for tag, value in point.values.items():
                self._writers[name].add_scalar(tag, value, global_step=point.x, walltime=point.wall_time)

    def _begin(self, island: str, generation: int, first_step: int) -> None:
        """A new file for an incarnation; file names have seconds only, so its number is part of them."""
        self._generations[island] = generation
        self._open(f"islands/{island}", f"{self._suffix}-g{generation}", first_step)

    def _open(self, name: str, suffix: str, purge_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        if name in self._writers:
            self._writers.pop(name).close()
        self._writers[name] = SummaryWriter(
            str(self._folder / name), purge_step=purge_step, filename_suffix=suffix, flush_secs=15
        )

    def close(self) -> None:
        """Flush the files, and upload them if the run folder is not local."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        if self._upload:
            for path in sorted(self._folder.rglob("*")):
                if path.is_file():
                    self._storage.put_file(path, f"tensorboard/{path.relative_to(self._folder).as_posix()}")
            shutil.rmtree(self._folder)


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            [
                f"logging.wandb_project: wandb cannot be imported ({error})\n"
                "  fix: pip install 'elastic-islands[wandb]', or remove logging.wandb_project"
            ]
        ) from error
    return wandb


class WandbSink:
    """Sends metrics to a Weights & Biases project; works offline with `WANDB_MODE=offline`.

    `run_id` makes the attempts of one run one W&B run. Raises ConfigError (exit 2) without the extra.
    """

    def __init__(
        self,
        project: str,
        run_id: str,
        config: Mapping[str, object],
        folder: str | None = None,
        load: Callable[[], Any] = _import_wandb,
    ) -> None:
        self._run = load().init(
            project=project, id=run_id, name=run_id, resume="allow", config=dict(config), dir=folder
        )
        self._metrics = Metrics()
        self._islands: set[str] = set()
        self._run.define_metric("committed_tokens")
        for name in OUTER_METRICS:
            self._run.define_metric(name, step_metric="committed_tokens")

    def __call__(self, event: Event) -> None:
        """Take the next event."""
        for point in self._metrics.points(event):
            if point.island is None:
                self._run.log({"committed_tokens": point.x, **point.values})
                continue
            step = f"{point.island}/step"
            if point.island not in self._islands:
                self._islands.add(point.island)
                self._run.define_metric(step)
                self._run.define_metric(f"{point.island}/*", step_metric=step)
            values = {f"{point.island}/{name}": value for name, value in point.values.items()}
            self._run.log({step: point.x, f"{point.island}/generation": point.generation, **values})

    def close(self) -> None:
        """Finish the run; waits until wandb has sent what it holds."""
        self._run.finish()
