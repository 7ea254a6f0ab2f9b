"""`RunStatus` as text: one line that changes only when something happened, or all of it."""

from __future__ import annotations

from elastic.views.format import bytes_text, count_text, duration_text, one_line, plural
from elastic.views.progress import IslandProgress, Validation
from elastic.views.status import RunStatus


def status_line(status: RunStatus) -> str:
    """One line; equal lines mean that nothing worth telling has changed."""
    parts = [
        f"{status.run} {status.state}",
        f"attempt {status.attempt}",
        f"{status.progress:.0%}",
        "outer v" + ",".join(str(version) for version in status.versions or [0]),
    ]
    if status.validation is not None and status.validation.loss is not None:
        parts.append(f"val {status.validation.loss:.2f} of v{status.validation.version}")
    parts.append(" ".join(f"{i.name}:{i.state}/{i.generation}" for i in status.islands) or "no islands")
    if status.exit_code is not None:
        parts.append(f"exit code {status.exit_code}")
    return one_line(" | ".join(parts))


def status_text(status: RunStatus) -> list[str]:
    """All of it, as lines for people."""
    state = f"{status.state}, attempt {status.attempt}"
    if status.exit_code is not None:
        state += f", exit code {status.exit_code}" + (f": {one_line(status.reason)}" if status.reason else "")
    elif status.last_event_age_s is not None:
        age = duration_text(status.last_event_age_s)
        state += f"; last event {age} ago by the writer's clock ({status.last_event})"
    left = f", about {duration_text(status.left_s)} left" if status.left_s is not None else ""
    outer = f"v{','.join(map(str, status.versions)) or '0'}, {plural(status.outer_steps, 'outer step')}"
    if status.synchronous_steps:
        outer += f", {plural(status.synchronous_steps, 'synchronous step')}"
    lines = [
        f"run        {status.run} in {status.url}",
        f"state      {state}",
        f"progress   {status.progress:.0%}, {status.committed_sequences:,} of"
        f" {plural(status.total_sequences, 'sequence')}, {count_text(status.committed_tokens)} tokens,"
        f" {status.replayed_sequences:,} replayed{left}",
        f"outer      {outer}" + (f", phase {status.phase}" if status.phase else ""),
    ]
    if status.preparing:
        lines.append(f"data       {status.preparing.removeprefix('data: ')}")
    if status.validation is not None:
        lines.append(f"validation {_validation_text(status.validation)}")
    lines.append(
        f"traffic    up {bytes_text(status.bytes_up)}, down {bytes_text(status.bytes_down)} (of it warm-up"
        f" {bytes_text(status.bytes_up_warmup)}, {bytes_text(status.bytes_down_warmup)})"
    )
    lines += [f"island     {_island_text(island)}" for island in status.islands]
    lines += [f"warning    {one_line(warning.removeprefix('warning: '))}" for warning in status.warnings]
    return lines


def _validation_text(validation: Validation) -> str:
    text = f"v{validation.version}"
    if validation.loss is not None:
        text += f" loss {validation.loss:.4f}"
    if validation.nats_per_byte is not None:
        text += f", {validation.nats_per_byte:.4f} nats per byte"
    return text + f", {plural(validation.sequences, 'sequence')}" + (", final" if validation.final else "")


def _island_text(island: IslandProgress) -> str:
    parts = [f"{island.name}: {island.state}", f"generation {island.generation}", f"step {island.step:,}"]
    if island.loss is not None:
        parts.append(f"loss {island.loss:.2f}")
    if island.state == "running":
        parts += [f"{count_text(island.tokens_per_s)} tok/s", plural(island.workers, "worker")]
    if island.version is not None:
        parts.append(f"v{island.version}")
    return one_line(", ".join(parts) + f"; last event {island.last_event or 'none'}")
