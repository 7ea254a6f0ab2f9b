"""At which inner steps a fragment is snapshotted and at which its new version is adopted.

A period has `sync_every` (H) inner steps. Fragment p of P is due at step `floor((p+1)*H/P)` of each
period; its delta is taken `overlap_steps` before that and its new version adopted right after the
due step. Steps count from 1, and the adoption step is the same on all ranks of an island.
"""

from __future__ import annotations

from dataclasses import dataclass


def due_step(period_start: int, fragment: int, fragments: int, sync_every: int) -> int:
    """The step at which `fragment` is due in the period that begins after step `period_start`."""
    return period_start + (fragment + 1) * sync_every // fragments


def is_due(step: int, fragment: int, fragments: int, sync_every: int) -> bool:
    """Whether `fragment` is due at `step`, counted from 1 since the schedule began."""
    if step < 1:
        return False
    period_start = (step - 1) // sync_every * sync_every
    return step == due_step(period_start, fragment, fragments, sync_every)


@dataclass(frozen=True)
class Pace:
    """The timing of all fragments. The steps of its methods count from 1 since the schedule began.

    A due step so early that its snapshot would lie before step 1 is skipped for that fragment.
    Raises ValueError unless 1 <= fragments <= sync_every and 0 <= overlap_steps <= sync_every.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.sync_every:
            raise ValueError(f"{self.fragments} fragments do not fit into {self.sync_every} inner steps")
        if not 0 <= self.overlap_steps <= self.sync_every:
            raise ValueError(f"overlap of {self.overlap_steps} steps in a period of {self.sync_every}")

    def snapshots_at(self, step: int) -> tuple[int, ...]:
        """Fragments whose delta is taken after this step."""
        if step < 1:
            return ()
        return self._due(step + self.overlap_steps)

    def adoptions_at(self, step: int) -> tuple[int, ...]:
        """Fragments whose new version is adopted after this step."""
        if step - self.overlap_steps < 1:
            return ()
        return self._due(step)

    def _due(self, step: int) -> tuple[int, ...]:
        fragments = range(self.fragments)
        return tuple(p for p in fragments if is_due(step, p, self.fragments, self.sync_every))
