"""The controller's islands: where they fit, their actors, how they end, when they start again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from elastic.base.config import ExistingCluster, Fleet, Island
from elastic.base.errors import DeadlineError, PlacementError
from elastic.base.events import EventSink
from elastic.base.known import known
from elastic.exchange.link import Snapshot
from elastic.policy.placement import Fit, NodeRecord, fit
from elastic.policy.recovery import Decision, Done, Ending, Record, Restart, Stop, decide
from elastic.runtime.island import Outcome, start_island
from elastic.runtime.preparing import Prepared
from elastic.runtime.worker import WorkerSpec
from elastic.state.storage import Storage


@dataclass
class Running:
    """One island as the controller knows it."""

    island: Island
    actor: Any = None
    run: Any = None
    """Reference of the actor's `run`; its value is an `Outcome`."""
    starts: int = 0
    record: Record = field(default_factory=Record)
    restart_at: float | None = None
    ended: bool = False


class Islands:
    """All islands of an attempt. Raises PlacementError if too few of them can ever be placed."""

    def __init__(
        self,
        fleet: Fleet,
        nodes: list[NodeRecord],
        prepared: Prepared,
        storage: Storage,
        epoch: int,
        events: EventSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._prepared, self._storage = fleet, prepared, storage
        self._epoch, self._events, self._clock = epoch, events, clock
        self._fits = fit(fleet.islands, nodes, fleet.region_label, fleet.region_resource)
        placed = placeable(fleet, self._fits, events)
        self._all = {island.name: Running(island) for island in fleet.islands if island.name in placed}

    @property
    def names(self) -> tuple[str, ...]:
        """Islands of this attempt, sorted."""
        return tuple(sorted(self._all))

    def start_all(self, synchronizer: Any) -> None:
        """Start every island."""
        for running in self._all.values():
            self._start(running, synchronizer)

    def _start(self, running: Running, synchronizer: Any) -> None:
        island, job = running.island, self._prepared.job
        workers = [island.workers.min, island.workers.max]
        self._events.emit(
            "island_starting", {"island": island.name, "region": island.region, "workers": workers}
        )
        spec = WorkerSpec(
            job=job,
            island=island.name,
            epoch=self._epoch,
            start=running.starts,
            storage=self._storage,
            corpus_cache=self._prepared.corpus_cache,
            corpus_key=self._prepared.info.key,
            manifest=self._prepared.info.manifest_hash,
            vocab_size=self._prepared.info.vocab_size,
            threads=known(island.threads_per_worker),
            synchronizer=synchronizer,
        )
        running.actor = start_island(self._fleet, island)
        running.run = running.actor.run.remote(self._fleet, island, spec)
        running.starts += 1
        running.restart_at = None

    # ------------------------------------------------------------------------------- observing

    def wait(self, timeout_s: float) -> None:
        """Wait until an island ends, or for `timeout_s`."""
        runs = [running.run for running in self._all.values() if running.run is not None]
        if runs:
            ray.wait(runs, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def endings(self, view: Snapshot) -> list[tuple[str, Ending]]:
        """How islands have ended since the last call; those that finished in order are noted here."""
        found: list[tuple[str, Ending]] = []
        for name, running in self._all.items():
            if running.run is None or not ray.wait([running.run], timeout=0)[0]:
                continue
            outcome = _outcome(running.run)
            ray.kill(running.actor)
            running.run = running.actor = None
            if outcome.kind == "finished":
                running.ended = True
                continue
            beat = view.beats.get(name)
            ending = Ending(
                kind="lost" if outcome.kind == "lost" else "error",
                version=view.merged_version.get(name, -1),
                step=beat.step if beat else 0,
                what=outcome.what,
                traceback=outcome.traceback,
                exit_code=outcome.exit_code,
            )
            found.append((name, ending))
        return found

    def all_ended(self, among: Collection[str] | None = None) -> bool:
        """Whether no island, or none of these, runs or will start again."""
        return all(
            running.ended or (running.run is None and running.restart_at is None)
            for name, running in self._all.items()
            if among is None or name in among
        )

    # ---------------------------------------------------------------------------------- acting

    def decide(self, name: str, ending: Ending) -> tuple[Ending, Decision]:
        """What the policy says about an ending; a restart is planned here and carried out when due."""
        running = self._all[name]
        running.record, decision = decide(name, running.record, ending)
        if isinstance(decision, Restart):
            running.restart_at = self._clock() + decision.delay_s
            fields = {"island": name, "reason": decision.reason, "delay_s": decision.delay_s}
            self._events.emit("island_restarting", fields)
        elif isinstance(decision, Done | Stop):
            running.ended = True
        return ending, decision

    def restart_due(self, synchronizer: Any) -> None:
        """Start the islands whose pause is over."""
        for running in self._all.values():
            if running.restart_at is not None and self._clock() >= running.restart_at:
                self._start(running, synchronizer)

    def end_all(self) -> None:
        """Leave no actor running; their placement groups go with them."""
        for running in self._all.values():
            running.restart_at = None
            if running.actor is not None:
                ray.kill(running.actor)
                running.actor = running.run = None

    def late(self, joined: Collection[str]) -> DeadlineError:
        """The error when too few islands have joined in time."""
        missing = [found.sentence for found in self._fits if found.island not in joined]
        return DeadlineError(
            f"only {len(joined)} of {len(self._all)} islands joined within start_timeout_s = "
            f"{self._fleet.start_timeout_s:g} s, min_islands is {self._fleet.min_islands}",
            saw="; ".join(missing),
            fix="free or add nodes with the label, lower workers or min_islands, or raise start_timeout_s",
        )


def placeable(fleet: Fleet, fits: list[Fit], events: EventSink) -> set[str]:
    """Names of the islands that can be placed; PlacementError if they are fewer than `min_islands`."""
    grows = isinstance(fleet.cluster, ExistingCluster) and fleet.cluster.autoscaling
    never = [found for found in fits if not found.ever and not grows]
    placed = {found.island for found in fits} - {found.island for found in never}
    if len(placed) < known(fleet.min_islands):
        raise PlacementError(
            f"the cluster can hold {len(placed)} of {len(fits)} islands, min_islands is {fleet.min_islands}",
            where="fleet.islands",
            saw="; ".join(found.sentence for found in never),
            fix="lower workers or cpus_per_worker, add nodes with the label, lower min_islands, "
            "or set cluster.autoscaling if the cluster grows by itself",
        )
    for found in never:
        events.emit("warning", {"what": f"left out, it can never be placed: {found.sentence}"})
    return placed


def _outcome(run: Any) -> Outcome:
    """The outcome of an island's run; the death of its actor is one, too."""
    try:
        return ray.get(run)
    except RayTaskError as error:
        return Outcome("error", str(error.cause), str(error))
    except RayActorError as error:
        return Outcome("lost", str(error).splitlines()[0])
