"""The section `outer` of a job: the optimiser between islands (DESIGN section 4).

One mechanism with parameters. A preset is nothing but values for the fields that are left out
(`elastic.base.presets`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic.base.section import Positive, Section, Share

Codec = Literal["fp32", "bf16", "int8", "int4", "e3m0"]
PresetName = Literal["average", "diloco", "streaming", "decoupled", "synchronous"]


class Outer(Section):
    """The optimiser between islands. A preset is nothing but values of the other fields."""

    preset: PresetName = "diloco"
    """`average`: parameters; `diloco`: deltas with outer momentum; `streaming`: in fragments, overlapped, 4
    bits; `decoupled`: the same without waiting for the slow; `synchronous`: gradients."""
    sync_every: Positive | None = None
    """Inner steps between two outer steps of a fragment (H). Derived from the preset."""
    fragments: Positive | None = None
    """Parts of the parameters that are synchronised one after the other (P). Derived from the preset."""
    fragment_pattern: Literal["sequential", "strided", "balanced"] | None = None
    """Which layers form a fragment: neighbours, every P-th, or even sizes. Derived from the preset."""
    overlap_steps: Annotated[int, Field(ge=0)] | None = None
    """Inner steps between the snapshot of a delta and the adoption of the version that it leads to; what
    travels meanwhile costs no waiting. At most `sync_every`. Derived from the preset."""
    mix: Literal["blend", "keep-progress"] | None = None
    """How a new version is adopted: blended with the local values by `alpha`, or with the progress made
    since the snapshot on top of it. Derived from the preset."""
    alpha: Share | None = None
    """Share of the local values in a blend. Derived from the preset."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Outer learning rate. Derived from the preset."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Outer Nesterov momentum. Derived from the preset."""
    warmup: Share | None = None
    """Share of the budget run synchronously first. Derived from the preset."""
    weights: Literal["tokens", "uniform", "tokens_rate"] = "tokens"
    """How contributions are weighted: by tokens, equally, or by tokens times tokens per inner step."""
    merge: Literal["mean", "rda", "trimmed"] = "mean"
    """How contributions become one: weighted mean; `rda`: mean of directions and of lengths apart;
    `trimmed`: mean without the extremes of each coordinate, against islands that cannot be trusted."""
    codec_up: Codec | None = None
    """How deltas travel from island to synchronizer. Derived from the preset."""
    codec_down: Codec | None = None
    """How new versions travel back; what rounding leaves over is carried on. Derived from the preset."""
    quorum: Positive | Literal["all"] | None = None
    """Islands whose contributions a merge waits for: a number, or `all` live ones. Derived from the
    preset."""
    grace_s: Annotated[float, Field(ge=0)] | None = None
    """Longest wait for the others once the quorum is in; never longer than the overlap leaves. Derived from
    the preset."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Versions that a late contribution may lie behind; older ones are refused. Derived from the preset."""
    staleness_discount: Annotated[float, Field(ge=0)] = 0.5
    """Weight of a contribution s versions late: 1 / (1 + staleness_discount * s)."""
    partial: Literal["share", "full"] = "share"
    """The step when islands are missing: scaled by the share of the tokens that is there, or full."""
    norm_limit: Annotated[float, Field(gt=1)] = 100.0
    """A delta this many times longer than the usual ones is refused by name."""
    island_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Without a heartbeat for this long an island leaves the open outer step."""
    sync_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait of an island for a new version before it restarts."""
