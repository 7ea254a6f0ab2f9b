"""The carrier inside one Ray cluster: calls to the synchronizer's actor, tensors in the object store.

Tensors of a version or of a merged gradient are put once and fetched by reference, so that ranks of
one node share one copy. Control calls have a concurrency group of their own in the actor: a beat
never queues behind weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from elastic.base.errors import DeadlineError, ResumableError
from elastic.exchange.link import (
    Beat,
    Command,
    Donate,
    Entry,
    Hello,
    Judgement,
    Member,
    Packet,
    Part,
    Receipt,
    Work,
)

CALL_TIMEOUT_S = 60.0
"""Longest wait for the answer to a call, beyond what the call itself waits."""


class RayLink:
    """`exchange.link.Link` over a handle of `runtime.actors.SynchronizerActor`."""

    def __init__(self, synchronizer: Any) -> None:
        self._synchronizer = synchronizer

    def _call(self, method: str, *arguments: Any, waits_s: float = 0.0) -> Any:
        reference = getattr(self._synchronizer, method).remote(*arguments)
        try:
            return ray.get(reference, timeout=CALL_TIMEOUT_S + waits_s)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise ResumableError(
                "the synchronizer died",
                saw=str(error).splitlines()[0],
                fix="the same command continues the run from its last durable state",
            ) from error
        except GetTimeoutError as error:
            raise DeadlineError(
                f"the synchronizer did not answer `{method}`",
                saw=f"no answer within {CALL_TIMEOUT_S + waits_s:g} s",
                fix="the same command continues the run from its last durable state",
            ) from error

    def join(self, hello: Hello) -> int:
        """See `Link.join`."""
        return self._call("join", hello)

    def enter(self, member: Member, hello: Hello, timeout_s: float) -> Entry | None:
        """See `Link.enter`."""
        answer = self._call("enter", member, hello, timeout_s, waits_s=timeout_s)
        if answer is None:
            return None
        entry, tensors, moments = answer
        wires = ray.get([*tensors, *moments], timeout=CALL_TIMEOUT_S)
        return dataclasses.replace(entry, tensors=wires[0], moments=wires[1] if moments else None)

    def lease(self, member: Member, versions: tuple[int, ...]) -> Work:
        """See `Link.lease`."""
        return self._call("lease", member, versions)

    def offer(self, part: Part) -> Receipt:
        """See `Link.offer`."""
        return self._call("offer", part)

    def fetch(
        self, member: Member, kind: str, fragment: int, number: int, timeout_s: float
    ) -> Packet | Donate | None:
        """See `Link.fetch`."""
        answer = self._call("fetch", member, kind, fragment, number, timeout_s, waits_s=timeout_s)
        if not isinstance(answer, tuple):
            return answer
        packet, tensors = answer
        return dataclasses.replace(packet, tensors=ray.get(tensors[0], timeout=CALL_TIMEOUT_S))

    def beat(self, member: Member, beat: Beat) -> Command:
        """See `Link.beat`."""
        return self._call("beat", member, beat)

    def judged(self, member: Member, judgement: Judgement) -> None:
        """See `Link.judged`."""
        self._call("judged", member, judgement)

    def leave(self, member: Member, reason: str, checkpoint: str = "") -> None:
        """See `Link.leave`."""
        self._call("leave", member, reason, checkpoint)
