"""The last lines that a run prints, from its `result.json`."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.views.format import bytes_text, count_text, duration_text, integer, number, one_line, plural


def summary(
    result: Mapping[str, object], run_quoted: str, command: str = "elastic", tensorboard: bool = True
) -> list[str]:
    """The last lines of a run, from its `result.json`; `run_quoted` is the run folder as a shell word."""

    def total(name: str) -> int:
        return integer(result.get(name))

    lines = [
        f"{result.get('status')}: {plural(total('outer_steps'), 'outer step')},"
        f" {plural(total('islands'), 'island')}, {duration_text(number(result.get('wall_s')) or 0)}"
    ]
    if result.get("reason"):
        lines.append(f"  reason: {one_line(result['reason'])}")
    loss, per_byte = number(result.get("final_val_loss")), number(result.get("final_val_nats_per_byte"))
    if loss is not None:
        text = f"  validation loss of the outer parameters {loss:.4f}"
        if per_byte is not None:
            text += f", {per_byte:.4f} nats per byte on {bytes_text(total('validation_bytes'))}"
        lines.append(text)
    lines.append(
        f"  committed {total('committed_sequences'):,} of {total('total_sequences'):,} sequences"
        f" ({count_text(total('committed_tokens'))} tokens), {total('replayed_sequences'):,} replayed"
    )
    lines.append(
        f"  traffic up {bytes_text(total('bytes_up'))}, down {bytes_text(total('bytes_down'))}"
        f" (of it warm-up {bytes_text(total('bytes_up_warmup'))}, {bytes_text(total('bytes_down_warmup'))})"
    )
    cost = number(result.get("cost"))
    if cost:
        lines.append(f"  cost {cost:.2f}")
    lines.append("next:")
    if result.get("status") != "done":
        lines.append("  the same command continues this run")
    steps = [f"{command} status {run_quoted}", f"{command} audit {run_quoted}"]
    if result.get("status") == "done":
        steps.append(f"{command} export {run_quoted} DIR")
    if tensorboard:
        steps.append(f"tensorboard --logdir {run_quoted}/tensorboard   # pip install tensorboard")
    return lines + [f"  {step}" for step in steps]
