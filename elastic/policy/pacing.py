"""At which inner steps a fragment is snapshotted and at which its new version is adopted.

A period has `sync_every` (H) inner steps. Fragment p of P is due at step `floor((p+1)*H/P)` of each
period; its delta is taken after the step `overlap_steps` before that and its new version adopted right
after the due step. Steps are those of the schedule and count from 1; the adoption step is the same on
all ranks of an island.

An island need not begin at step 0. One that enters a run takes the position of the others as its
`start` (`Pace.position_after`) and counts on from there. Of the fragments that fall due soon, the usual
moment of the snapshot has passed; their snapshot is taken at `start`. It holds no progress, but it
answers, so that the others do not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction


def due_step(period_start: int, fragment: int, fragments: int, sync_every: int) -> int:
    """The step at which `fragment` is due in the period that begins after step `period_start`."""
    return period_start + (fragment + 1) * sync_every // fragments


def is_due(step: int, fragment: int, fragments: int, sync_every: int) -> bool:
    """Whether `fragment` is due at `step`, counted from 1 since the schedule began."""
    if step < 1:
        return False
    period_start = (step - 1) // sync_every * sync_every
    return step == due_step(period_start, fragment, fragments, sync_every)


def sync_every_for(
    tokens_per_s: Mapping[str, float], sync_every: int, fragments: int, overlap_steps: int = 0
) -> dict[str, int]:
    """Inner steps a period for each island, so that fast and slow ones arrive together.

    `H_i = floor(v_i / v_max * H)` (arXiv 2401.09135, dynamic local updates), never less than `fragments`
    or `overlap_steps`, which must fit into a period. An island whose speed is not known (0) keeps H.
    """
    # in fractions: as floats, 29 / 100 * 100 is below 29
    speeds = {island: Fraction(speed) for island, speed in tokens_per_s.items() if _is_speed(speed)}
    fastest = max(speeds.values(), default=Fraction(1))
    least = max(fragments, overlap_steps, 1)
    return {
        island: max(least, math.floor(speeds.get(island, fastest) / fastest * sync_every))
        for island in tokens_per_s
    }


@dataclass(frozen=True)
class Pace:
    """The timing of all fragments.

    `step` and `start` are steps of the schedule: the position at which an island began, plus its own
    steps since. After a step, first adopt, then take snapshots: with an overlap of a whole period both
    fall on the same step. Raises ValueError unless 1 <= fragments <= sync_every and
    0 <= overlap_steps <= sync_every.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.sync_every:
            raise ValueError(f"{self.fragments} fragments do not fit into {self.sync_every} inner steps")
        if not 0 <= self.overlap_steps <= self.sync_every:
            raise ValueError(f"overlap of {self.overlap_steps} steps in a period of {self.sync_every}")

    def position_after(self, fragment: int) -> int:
        """The step of the period at which `fragment` is due, 0 .. H-1; 0 for the last fragment.

        An island that starts there is in phase with one that has just adopted `fragment`.
        """
        return due_step(0, fragment, self.fragments, self.sync_every) % self.sync_every

    def late_snapshots(self, start: int) -> tuple[int, ...]:
        """Fragments to snapshot on entry at `start`: due in (start, start + overlap], in that order."""
        soon = range(start + 1, start + self.overlap_steps + 1)
        return tuple(fragment for step in soon for fragment in self._due(step))

    def snapshots_at(self, step: int, start: int = 0) -> tuple[int, ...]:
        """Fragments whose delta is taken after this step; not those of `late_snapshots(start)`."""
        return self._due(step + self.overlap_steps) if step > start else ()

    def adoptions_at(self, step: int, start: int = 0) -> tuple[int, ...]:
        """Fragments whose new version is adopted after this step."""
        return self._due(step) if step > start else ()

    def _due(self, step: int) -> tuple[int, ...]:
        fragments = range(self.fragments)
        return tuple(p for p in fragments if is_due(step, p, self.fragments, self.sync_every))


def _is_speed(tokens_per_s: float) -> bool:
    return tokens_per_s > 0 and math.isfinite(tokens_per_s)
