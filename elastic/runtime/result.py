"""What a run came to: the content of result.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from elastic.state.layout import RESULT_FILE
from elastic.state.storage import Storage
from elastic.views.event_log import plain


@dataclass(kw_only=True)
class Result:
    """Outcome of an attempt, and the counters of the whole run."""

    status: str
    """done, stopped, failed."""
    exit_code: int
    reason: str = ""
    run: str = ""
    run_folder: str = ""
    attempt: int = 0
    islands: int = 0
    outer_steps: int = 0
    synchronous_steps: int = 0
    committed_sequences: int = 0
    total_sequences: int = 0
    committed_tokens: int = 0
    replayed_sequences: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_up_warmup: int = 0
    bytes_down_warmup: int = 0
    final_val_loss: float | None = None
    """Nats per token of the outer parameters on all held-out sequences; None before the end."""
    final_val_nats_per_byte: float | None = None
    validation_bytes: int = 0
    versions: list[int] = field(default_factory=list)
    digest: str = ""
    hours: float = 0.0
    """Of all attempts together."""
    cost: float = 0.0
    wall_s: float = 0.0
    """Of this attempt."""
    started: str = ""
    ended: str = ""

    def to_json(self) -> dict[str, object]:
        """All fields, in their order."""
        return asdict(self)

    def write(self, storage: Storage) -> None:
        """Publish result.json."""
        storage.write(
            RESULT_FILE, (json.dumps(plain(self.to_json()), indent=1, allow_nan=False) + "\n").encode()
        )


def read_result(storage: Storage) -> dict[str, object] | None:
    """The content of result.json, None if it is not there."""
    try:
        return json.loads(storage.read(RESULT_FILE))
    except FileNotFoundError:
        return None
