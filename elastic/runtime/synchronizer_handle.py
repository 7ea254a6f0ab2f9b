"""The controller's end of the synchronizer: place the actor, open it, look at it, end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from elastic.base.config import Fleet
from elastic.base.errors import DeadlineError, PlacementError, ResumableError
from elastic.exchange.link import Snapshot
from elastic.policy.placement import choose_control_node
from elastic.runtime import cluster
from elastic.runtime.actors import SynchronizerActor
from elastic.runtime.board import RunSetup
from elastic.state.storage import Storage

OPEN_TIMEOUT_S = 600.0
"""Loading or initialising the parameters of a large model takes a while."""
CALL_TIMEOUT_S = 60.0
CHECK_EVERY_S = 0.5
LONGEST_CAUSE = 600
"""Characters of Ray's account of an actor's death that are shown."""


class SynchronizerHandle:
    """One synchronizer actor, on the control region's node or the driver's own."""

    def __init__(self, fleet: Fleet, setup: RunSetup, storage: Storage) -> None:
        node = choose_control_node(
            cluster.nodes(), fleet.region_label, fleet.control_region, cluster.own_node_id()
        )
        if node is None:
            raise PlacementError(
                "no node for the synchronizer",
                where=f"control_region {fleet.control_region}",
                saw=f"no living node with {fleet.region_label}={fleet.control_region}",
                fix="give the label to a stable node, or leave control_region out (the driver's own node)",
            )
        self._cursor = 0
        actor: Any = SynchronizerActor  # as `remote` made it
        strategy = cluster.pinned_to(node.node_id)
        self.actor: Any = actor.options(scheduling_strategy=strategy).remote(setup, storage)

    def _call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float = CALL_TIMEOUT_S,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """The answer of the actor; `check` is called all the while and may raise."""
        answer = getattr(self.actor, method).remote(*arguments)
        deadline = time.monotonic() + timeout_s
        while not ray.wait([answer], timeout=CHECK_EVERY_S)[0] and time.monotonic() < deadline:
            check()
        try:
            return ray.get(answer, timeout=0)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise ResumableError(
                "the synchronizer died",
                saw=" ".join(str(error).split())[:LONGEST_CAUSE],
                fix="run the same command again: it continues from the last durable version",
            ) from error
        except GetTimeoutError as error:
            raise DeadlineError(
                f"the synchronizer did not answer `{method}`",
                saw=f"no answer within {timeout_s:g} s",
                fix="run the same command again: it continues from the last durable version",
            ) from error

    def open(self, check: Callable[[], None] = lambda: None) -> None:
        """Load the newest durable state, or make version 0. Raises what that or `check` raises."""
        self._call("open", timeout_s=OPEN_TIMEOUT_S, check=check)

    def look(self) -> tuple[Snapshot, list[dict[str, Any]]]:
        """The state now, and the events since the last look."""
        snapshot, self._cursor, events = self._call("look", self._cursor)
        return snapshot, events

    def begin(self) -> None:
        """Start with the islands that joined."""
        self._call("begin")

    def stop(self, reason: str) -> None:
        """Ask all islands to save themselves and end."""
        self._call("stop", reason)

    def declare_lost(self, island: str, reason: str) -> None:
        """An island died."""
        self._call("declare_lost", island, reason)

    def close(self) -> Snapshot:
        """Finish what is being made durable; the final state."""
        return self._call("close")

    def kill(self) -> None:
        """Leave nothing running."""
        ray.kill(self.actor)
