"""What one rank of an island holds, and the questions it answers alike on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic.base.config import Job
from elastic.base.events import EventSink
from elastic.base.known import known
from elastic.exchange.link import Basis, Beat, FencedError, Link, Member, Receipt
from elastic.exchange.wire import Wire, unpack_rows
from elastic.policy.schedule import lr_at, progress
from elastic.runtime.feed import Feed
from elastic.runtime.heart import Heart
from elastic.runtime.island_store import IslandStore, Saved
from elastic.training.corpus import Corpus
from elastic.training.digest import finish_digest, partial_digest
from elastic.training.fragments import fragments_of
from elastic.training.group import Group
from elastic.training.inner import Inner
from elastic.training.order import Order
from elastic.training.shard import local_of, parameters_of, rows_of, spoken_rows

if TYPE_CHECKING:
    from elastic.runtime.phase import Phase


T = TypeVar("T")


class StopAsked(Exception):  # not an error: somebody wants the run to end
    """The island was waiting when it was asked to stop."""


class RebaseError(Exception):
    """A contribution was refused: the island goes on from the current version."""


@dataclass
class IslandRank:
    """Everything one rank of an island holds; only the loop changes it."""

    name: str
    job: Job
    link: Link
    group: Group
    inner: Inner
    corpus: Corpus
    events: EventSink
    versions: Mapping[str, str]
    device: str
    store: IslandStore | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    member: Member | None = None
    """Who the island speaks as; None until it has joined."""
    basis: Basis | None = None
    step: int = 0
    """Inner steps of this island since the run began."""
    refusals: int = 0
    """Contributions refused since the last adopted version."""
    stall_s: float = 0.0
    """Seconds the inner loop stood still for the other islands."""
    beat: Beat = Beat(0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, "starting")
    step_s: float = 0.0
    """Seconds of an inner step, lately."""
    rate_window: tuple[float, int] = (0.0, 0)
    """When the present measurement of tokens/s began, and its tokens so far."""
    saved: Saved | None = None
    """The checkpoint found at the start, until the first entry has used it."""
    feed: Feed = field(init=False)
    heart: Heart = field(init=False)

    def __post_init__(self) -> None:
        self.fragments = fragments_of(self.inner.model, self.job.outer)
        self.feed = Feed(self.job.inner.batch_sequences, len(self.fragments))
        self.order = Order(len(self.corpus.train), self.job.seed)
        self.parameters = parameters_of(self.inner.model)
        self.heart = Heart(self.link, lambda: self.member, lambda: self.beat)
        # Encoding and sending, receiving and decoding have threads of their own: the inner loop goes on
        # meanwhile. A wait for one fragment must never hold up another, or islands could wait in a ring.
        self.sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-send")
        receivers = len(self.fragments)
        self.receiver = ThreadPoolExecutor(max_workers=receivers, thread_name_prefix="elastic-receive")
        self._phase: Phase | None = None

    @property
    def me(self) -> Member:
        """Who this rank speaks as, once the island has joined."""
        return known(self.member)

    @property
    def phase(self) -> Phase:
        """How inner steps reach the other islands, once the island has entered."""
        return known(self._phase)

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase

    @property
    def has_entered(self) -> bool:
        """Whether the island has ever held the global parameters."""
        return self._phase is not None

    # ------------------------------------------------------------------ parameters of this rank

    def local(self) -> dict[str, torch.Tensor]:
        """This rank's rows of every trainable parameter; views, not copies."""
        return {name: local_of(parameter) for name, parameter in self.parameters.items()}

    def placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, torch.Tensor]]:
        """The rows this rank speaks for, with the number of the first one in the whole tensor."""
        spoken = {name: spoken_rows(self.parameters[name], self.group.rank) for name in tensors}
        return {name: (spoken[name][0], rows) for name, rows in tensors.items() if spoken[name] != (0, 0)}

    def own_rows(
        self, wire: Wire, prefix: str = "", names: Iterable[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """This rank's rows of the whole tensors `prefix + name` of a wire, fp32, on its device."""
        rows = {}
        for name in self.parameters if names is None else names:
            parameter = self.parameters[name]
            own = unpack_rows(wire, prefix + name, tuple(parameter.shape), *rows_of(parameter))
            rows[name] = own.to(local_of(parameter).device)
        return rows

    def digest_of(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Digest of the whole tensors of which the ranks hold rows. All ranks must call it."""
        return finish_digest(self.group.sum(partial_digest(self.placed(tensors))))

    # ------------------------------------------------------------------------------- agreement

    def agree(self, decide: Callable[[], Any]) -> Any:
        """Rank 0's JSON answer on all ranks; being fenced is an answer too."""

        def guarded() -> dict[str, Any]:
            try:
                return {"value": decide()}
            except FencedError as fenced:
                return {"fenced": [fenced.reason, fenced.superseded]}

        outcome = self.group.share(guarded)
        if "fenced" in outcome:
            raise FencedError(*outcome["fenced"])
        return outcome["value"]

    def settle(self, send: Callable[[], Receipt]) -> None:
        """Hand in this rank's part, and agree with the other ranks whether all were accepted."""
        receipt = self.everyone(send)
        refused = receipt.status == "refused"
        if self.group.sum(torch.tensor([int(refused)])).item():
            raise RebaseError(receipt.reason if refused else "refused at another rank")

    def everyone(self, act: Callable[[], T]) -> T:
        """What `act` gives this rank; all ranks must call it, and if one is fenced, all are."""
        given: list[T] = []
        fenced = FencedError("fenced at another rank", superseded=False)
        try:
            given.append(act())
        except FencedError as error:
            fenced = error
        votes = torch.tensor([int(not given), int(fenced.superseded)])
        outside, superseded = self.group.sum(votes).tolist()
        if outside:
            raise FencedError(fenced.reason, bool(superseded))
        return given[0]

    def stop_asked(self) -> bool:
        """Whether the island should save itself and end; asked by rank 0."""
        return self.heart.stop_asked and (not self.has_entered or self.phase.may_stop())

    # --------------------------------------------------------------------------------- progress

    def abandon(self) -> None:
        """Give up what is under way: nothing of it is sent after this returns."""
        if self._phase is not None:
            self._phase.abandon()

    def end(self) -> None:
        """Let go of threads; what is under way is given up."""
        self.abandon()
        self.sender.shutdown(wait=False)
        self.receiver.shutdown(wait=False)

    def lr(self) -> float:
        """Learning rate of the next inner step (DESIGN section 4, "Learning rate")."""
        basis = known(self.basis)
        share = progress(
            basis.committed_tokens, self.phase.steps_since + 1, basis.tokens_per_step, basis.total_tokens
        )
        return lr_at(share, self.job.inner)

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """One event of this incarnation; only rank 0 speaks."""
        if self.group.rank == 0:
            generation = self.member.generation if self.member else 0
            self.events.emit(kind, {"island": self.name, "generation": generation, **fields})
