"""What the presets of the outer loop stand for: values of the parameters in `elastic.base.outer_config`."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.base.config import DecoderModel, Job


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Values for the fields of `outer` that a job leaves out.

    `layers_per_fragment` 0: a fixed number of `fragments`. `unused`: fields without effect under it.
    """

    source: str
    sync_every: int
    lr: float = 1.0
    momentum: float = 0.0
    warmup: float = 0.0
    fragments: int = 1
    layers_per_fragment: int = 0
    fragment_pattern: str = "sequential"
    overlap_steps: int = 0
    mix: str = "blend"
    alpha: float = 0.0
    codec_up: str = "fp32"
    codec_down: str = "fp32"
    quorum: int | str = "all"
    grace_s: float = 0.0
    max_staleness: int = 0
    unused: tuple[str, ...] = ()


DERIVED = (
    "sync_every",
    "fragments",
    "fragment_pattern",
    "overlap_steps",
    "mix",
    "alpha",
    "lr",
    "momentum",
    "warmup",
    "codec_up",
    "codec_down",
    "quorum",
    "grace_s",
    "max_staleness",
)
"""The fields of `outer` that a preset fills in."""

PRESETS: dict[str, Preset] = {
    "average": Preset(sync_every=50, source="plain periodic averaging (local SGD)"),
    "diloco": Preset(
        sync_every=20,
        lr=0.7,
        momentum=0.8,
        warmup=0.25,
        source="DiLoCo (arXiv 2311.08105); values of docs/explanation/learning.md",
    ),
    "streaming": Preset(
        sync_every=20,
        lr=0.7,
        momentum=0.8,
        warmup=0.25,
        layers_per_fragment=3,
        fragments=4,
        fragment_pattern="strided",
        overlap_steps=2,
        alpha=0.5,
        codec_up="int4",
        codec_down="int4",
        source="Streaming DiLoCo (arXiv 2501.18512); values of docs/explanation/learning.md",
    ),
    "decoupled": Preset(
        sync_every=24,
        lr=0.7,
        momentum=0.8,
        warmup=0.25,
        fragments=24,
        fragment_pattern="balanced",
        overlap_steps=2,
        codec_up="int4",
        codec_down="int4",
        quorum=1,
        grace_s=5.0,
        max_staleness=4,
        source="Decoupled DiLoCo (arXiv 2604.21428)",
    ),
    "synchronous": Preset(
        sync_every=20,
        warmup=1.0,
        source="gradients every step, made durable every 20",
        unused=(*(name for name in DERIVED if name != "sync_every"), "weights", "merge", "partial"),
    ),
}


def derived_outer(job: Job) -> dict[str, tuple[object, str]]:
    """The value and its reason for each field of `outer` that the job may leave out."""
    preset = PRESETS[job.outer.preset]
    why = f"preset {job.outer.preset}: {preset.source}"
    derived: dict[str, tuple[object, str]] = {name: (getattr(preset, name), why) for name in DERIVED}
    sync_every = job.outer.sync_every or preset.sync_every
    if preset.layers_per_fragment and isinstance(job.model, DecoderModel):
        layers = job.model.num_layers
        count = -(-layers // preset.layers_per_fragment)
        reason = f"one fragment per {preset.layers_per_fragment} of {layers} layers, {why}"
        derived["fragments"] = (count, reason)
    elif preset.fragments > 1:
        tensors = job.model.num_layers if isinstance(job.model, DecoderModel) else preset.fragments
        derived["fragments"] = (
            min(preset.fragments, tensors),
            f"{preset.fragments}, at most one a layer, {why}",
        )
    fragments = derived["fragments"][0]
    if isinstance(fragments, int) and fragments > sync_every:
        derived["fragments"] = (sync_every, f"no more than sync_every {sync_every}, {why}")
    if preset.overlap_steps > sync_every:
        derived["overlap_steps"] = (sync_every, f"no more than sync_every {sync_every}, {why}")
    return derived
