"""Facts as sentences: one self-contained line for each kind of event that is worth a line of its own.

Kinds that repeat all the time (`island_progress`, `outer_step`, `adopted`, `island_checkpoint`,
`data_progress`) have none: they show in the progress line and in the table.
"""

from __future__ import annotations

from elastic.views.event_log import Event
from elastic.views.format import bytes_text, count_text, duration_text, integer, number, one_line, plural
from elastic.views.progress import Progress, newest, spread

RATE_BOUND = ("validated", "refused", "warning", "fell_back")
"""Kinds with a line of their own that can come often: one line per interval for each sentence."""

MANY_ISLANDS = 4
"""Above this many islands a line gives the range of their losses instead of each."""


def _workers(value: object) -> str:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        low, high = integer(value[0]), integer(value[1])
        return plural(low, "worker") if low == high else f"{low} to {high} workers"
    return plural(integer(value), "worker")


def _short(digest: object) -> str:
    return str(digest or "-")[:12]


def _names(value: object) -> str:
    if isinstance(value, (list, tuple)):
        shown = ", ".join(str(entry) for entry in value[:5])
        return shown + (f" and {len(value) - 5} more" if len(value) > 5 else "")
    return str(value)


def _islands(value: object) -> str:
    return _names(value) if isinstance(value, (list, tuple)) else plural(integer(value), "island")


def _island(event: Event) -> str:
    return f"island {event['island']}"


def _data_ready(event: Event) -> str:
    text = (
        f"data ready: {plural(integer(event['train_sequences']), 'training sequence')}"
        f" ({bytes_text(integer(event['train_bytes']))}),"
        f" {integer(event['validation_sequences']):,} for validation"
        f" ({bytes_text(integer(event['validation_bytes']))})"
    )
    skipped = event.get("skipped")
    return f"{text}; skipped {_names(skipped)}" if skipped else text


def _run_started(event: Event) -> str:
    text = f"run {event['run']}: attempt {event['attempt']}"
    if not event["continued"]:
        return f"{text} begins"
    version = newest(event["versions"])
    return f"{text} continues" + ("" if version is None else f" from version {version}")


def _run_ended(event: Event) -> str:
    text = f"run {event['status']}, exit code {event['exit_code']}"
    return f"{text}: {event['reason']}" if event.get("reason") else text


def _validated(event: Event) -> str:
    loss, per_byte = number(event["loss"]), number(event["nats_per_byte"])
    text = f"{'final ' if event['final'] else ''}validation of v{event['version']}:"
    text += " loss -" if loss is None else f" loss {loss:.4f}"
    if per_byte is not None:
        text += f", {per_byte:.4f} nats per byte"
    return f"{text}, {plural(integer(event['sequences']), 'sequence')}"


def _joined(event: Event) -> str:
    step = integer(event["resumed_step"])
    return (
        f"{_island(event)} joined: generation {event['generation']}, {_workers(event['workers'])}"
        f" on {event['device']}, v{newest(event['version'])} digest {_short(event['digest'])}"
        + (f", continues after step {step}" if step else "")
    )


def _stopping(event: Event) -> str:
    reason, signal = str(event["reason"]), str(event.get("signal") or "")
    return f"stopping: {reason}" + (f" ({signal})" if signal and signal not in reason else "")


_SENTENCES = {
    "run_started": _run_started,
    "cluster": lambda e: str(e["what"]),
    "derived": lambda e: f"{e['key']} = {e['value']} ({e['why']})",
    "data_ready": _data_ready,
    "data_changed": lambda e: f"warning: changed since tokenised, the copy is used: {_names(e['files'])}",
    "run_stopping": _stopping,
    "run_ended": _run_ended,
    "island_starting": lambda e: f"{_island(e)}: placing {_workers(e['workers'])} in region {e['region']}",
    "island_joined": _joined,
    "island_lost": lambda e: (
        f"{_island(e)} lost (generation {e['generation']}): {e['reason']};"
        f" {plural(integer(e['returned_sequences']), 'sequence')} back in the queue"
    ),
    "island_restarting": lambda e: (
        f"{_island(e)} starts again in {duration_text(number(e['delay_s']) or 0)}: {e['reason']}"
    ),
    "island_left": lambda e: f"{_island(e)} left (generation {e['generation']}): {e['reason']}",
    "refused": lambda e: (
        f"refused from {_island(e)} (generation {e['generation']}): {e['reason']}"
        + (f" [{e['id']}]" if e.get("id") else "")
    ),
    "quarantined": lambda e: f"{_island(e)} is quarantined, the run goes on without it: {e['reason']}",
    "phase_changed": lambda e: (
        f"phase {e['phase']} from v{newest(e['version'])} digest {_short(e['digest'])}"
        f" on {_islands(e['islands'])}"
    ),
    "validated": _validated,
    "warning": lambda e: f"warning: {e['what']}",
    "fell_back": lambda e: f"warning: {e['name']} is bad ({e['reason']}); using {e['instead']}",
}


def describe(event: Event) -> str | None:
    """The sentence of an event, without its time; None if its kind has no line of its own."""
    sentence = _SENTENCES.get(str(event["kind"]))
    return None if sentence is None else one_line(sentence(event))


def _losses(progress: Progress) -> str:
    known = [(island.name, island.loss) for island in progress.running if island.loss is not None]
    if not known:
        return "loss -"
    if len(known) <= MANY_ISLANDS:
        return "loss " + " ".join(f"{name} {loss:.2f}" for name, loss in known)
    low, high = spread([loss for _, loss in known])
    return f"loss {low:.2f} to {high:.2f}"


def _steps(progress: Progress) -> str:
    steps = sorted({island.step for island in progress.running})
    if not steps:
        return "no island trains"
    return f"step {steps[0]}" if len(steps) == 1 else f"step {steps[0]}-{steps[-1]}"


def outer_text(progress: Progress) -> str:
    """Version and last validation of the outer parameters."""
    text = f"outer v{progress.outer_version or 0}"
    if progress.validation is not None and progress.validation.loss is not None:
        text += f" val {progress.validation.loss:.2f}"
    return text


def progress_text(progress: Progress, left_s: float | None) -> str:
    """The one progress line of the whole run, or of the data while they are prepared."""
    if progress.preparing is not None:
        return preparing_text(progress)
    running = progress.running
    parts = [
        _steps(progress),
        f"{progress.share:.0%}",
        _losses(progress),
        outer_text(progress),
        f"{count_text(progress.tokens_per_s)} tok/s",
        f"up {bytes_text(progress.bytes_up)} down {bytes_text(progress.bytes_down)}",
        f"{plural(len(running), 'island')}, {plural(sum(island.workers for island in running), 'worker')}",
    ]
    if left_s is not None:
        parts.append(f"{duration_text(left_s)} left")
    return one_line(" | ".join(parts))


def preparing_text(progress: Progress) -> str:
    """How far the corpus is."""
    if progress.preparing is None:
        return ""
    stage, done, total, unit = progress.preparing
    if unit == "bytes":
        amount = bytes_text(done) + (f" of {bytes_text(total)}" if total else "")
    else:
        amount = f"{done:,.0f}" + (f" of {total:,.0f}" if total else "") + (f" {unit}" if unit else "")
    return one_line(f"data: {stage} {amount}" + (f" ({min(1.0, done / total):.0%})" if total else ""))
