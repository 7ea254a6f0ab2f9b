"""Islands of two real ranks over a synchronizer in another process: `python two_ranks.py REQUESTS`.

REQUESTS is a JSON list of `{"scenario": name, "out": file, ...}`; the answer of each is pickled into its
`out`. torch is imported once and everything else is forked from here, ranks before any thread is
started. The link is a proxy of `multiprocessing.managers`: pickles over a local socket.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from elastic.base.config import Job
from elastic.exchange.link import FencedError
from elastic.policy.plan import block_sequences, total_sequences
from elastic.runtime.board import RunSetup
from elastic.runtime.heart import Heart
from elastic.runtime.island_loop import run_island
from elastic.runtime.island_rank import IslandRank
from elastic.runtime.island_store import IslandStore
from elastic.runtime.opening import open_synchronizer
from elastic.runtime.versions import library_versions
from elastic.state.lock import RunLock
from elastic.state.storage import Storage
from elastic.training.corpus import Corpus
from elastic.training.group import Group
from elastic.training.inner import Inner
from elastic.training.model import build_model
from elastic.training.shard import shard
from elastic.views.event_log import EventLog

FORK = multiprocessing.get_context("fork")
WORLD_SIZE = 2
TIMEOUT_S = 250.0
KEY = b"one test"
CALLS = ("join", "enter", "lease", "offer", "fetch", "beat", "judged", "leave")


class Served(BaseManager):
    """The synchronizer as other processes reach it."""


class FencedOnce:
    """A link that tells one rank that it is fenced, the first time it fetches from version 2 on."""

    def __init__(self, link: Any) -> None:
        self._link, self._done = link, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def fetch(self, member: Any, kind: str, fragment: int, number: int, timeout_s: float) -> Any:
        if kind == "version" and number >= 2 and not self._done:
            self._done = True
            raise FencedError("a test says so", superseded=False)
        return self._link.fetch(member, kind, fragment, number, timeout_s)


class Quiet:
    def emit(self, kind: str, fields: Any) -> None:
        """Rank 0 speaks."""

    def close(self) -> None:
        """Nothing to write."""


# ------------------------------------------------------------------------------------ a run


def run(request: dict[str, Any]) -> dict[str, Any]:
    """One island of two ranks, until done or, with `stop_at`, stopped at that version."""
    job, storage = Job.model_validate(request["job"]), Storage(request["run"])
    corpus = Corpus.open(request["corpus"])
    epoch = RunLock(storage).acquire(takeover_s=1.0)
    meeting = Path(request["out"]).with_suffix(".meet")
    ranks = [FORK.Process(target=_rank, args=(n, meeting, request, epoch)) for n in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    setup = RunSetup(
        job=job,
        run=job.name,
        epoch=epoch,
        islands=("eu",),
        total_sequences=total_sequences(job, len(corpus.train)),
        block_sequences=block_sequences(job),
        validation_sequences=len(corpus.validation),
        tokens_per_byte=corpus.info.validation.tokens_per_byte,
        vocab_size=corpus.info.vocab_size,
    )
    with EventLog(storage, f"synchronizer-a{epoch}") as events:
        synchronizer = open_synchronizer(setup, storage, events)
        Served.register("synchronizer", callable=lambda: synchronizer)
        server = Served(("127.0.0.1", 0), KEY).get_server()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _publish(meeting.with_suffix(".address"), json.dumps(server.address))
        deadline = time.monotonic() + TIMEOUT_S
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if "stop_at" in request and synchronizer.snapshot().version >= request["stop_at"]:
                synchronizer.stop("test")
            time.sleep(0.01)
        synchronizer.close()
        view = synchronizer.snapshot()
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return {
        "codes": codes,
        "endings": [_read(meeting.with_suffix(f".{n}")) for n in range(WORLD_SIZE)],
        "version": view.version,
        "finished": view.finished,
        "digest": view.digest,
        "counters": dict(view.counters),
        "validation": dict(view.validation),
    }


def _rank(number: int, meeting: Path, request: dict[str, Any], epoch: int) -> None:
    mesh = _meet(number, meeting)
    address = json.loads(_await(meeting.with_suffix(".address")))
    Served.register("synchronizer", exposed=CALLS)
    manager = Served(tuple(address), KEY)
    manager.connect()
    link = manager.synchronizer()  # type: ignore[attr-defined]
    if request.get("fence") and number == 1:
        link = FencedOnce(link)
    job, storage = Job.model_validate(request["job"]), Storage(request["run"])
    corpus = Corpus.open(request["corpus"])
    model = build_model(job.model, corpus.info.vocab_size, job.data.seq_len, job.seed)
    shard(model, mesh, torch.float32)
    events = EventLog(storage, f"island-eu-a{epoch}-0") if number == 0 else Quiet()
    rank = IslandRank(
        name="eu",
        job=job,
        link=link,
        group=Group(number, WORLD_SIZE),
        inner=Inner(model, job.inner, rank=number, world_size=WORLD_SIZE, mesh=mesh),
        corpus=corpus,
        events=events,
        versions=library_versions(),
        device="cpu",
    )
    rank.heart = Heart(link, lambda: rank.member, lambda: rank.beat, every_s=0.02)
    rank.store = IslandStore(storage, "eu", rank.group, rank.parameters, events, epoch=epoch)
    if "stop_at" in request and number == 0:
        _wait_for_the_stop(rank, request["stop_at"])
    ending = run_island(rank)
    events.close()
    _publish(meeting.with_suffix(f".{number}"), ending)
    dist.destroy_process_group()


def _wait_for_the_stop(rank: IslandRank, version: int) -> None:
    """Do not run past the version at which the run is stopped: hear of it first."""
    gradient = rank.inner.gradient

    def call(batch: Any) -> Any:
        while rank.phase.version >= version and not rank.heart.stop_asked:
            time.sleep(0.005)
        return gradient(batch)

    rank.inner.gradient = call  # type: ignore[method-assign]


# ------------------------------------------------------------------------------ agreement


def agree(request: dict[str, Any]) -> list[dict[str, Any]]:
    """What `Group` gives both ranks."""
    meeting = Path(request["out"]).with_suffix(".meet")
    ranks = [FORK.Process(target=_agreeing, args=(n, meeting)) for n in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    return [pickle.loads(meeting.with_suffix(f".{n}").read_bytes()) for n in range(WORLD_SIZE)]


def _agreeing(number: int, meeting: Path) -> None:
    _meet(number, meeting)
    group, seen = Group(number, WORLD_SIZE), {}

    def only_zero() -> dict[str, Any]:
        return {"asked": number, "list": [1, None, "é"]}

    def fails() -> None:
        raise KeyError("lease 7")

    seen["shared"] = group.share(only_zero)
    for name, decide in (("failed", fails), ("not json", lambda: {1, 2})):
        try:
            group.share(decide)
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
    seen["after"] = group.share(lambda: "still together")
    largest = torch.tensor([2**63 - 1, number + 1])
    seen["sum"] = group.sum(largest).tolist()
    seen["kept"] = largest.tolist()
    meeting.with_suffix(f".{number}").write_bytes(pickle.dumps(seen))
    dist.destroy_process_group()


# -------------------------------------------------------------------------------- processes


def _meet(number: int, meeting: Path) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=WORLD_SIZE)
    return init_device_mesh("cpu", (WORLD_SIZE,))


def _publish(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text)
    unfinished.rename(path)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _await(path: Path) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.005)
    return path.read_text()


def _answer(request: dict[str, Any]) -> None:
    try:
        answer = {"run": run, "agree": agree}[request["scenario"]](request)
        Path(request["out"]).write_bytes(pickle.dumps(answer))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # the server's threads would wait for their connections


def main(requests: list[dict[str, Any]]) -> int:
    """One process for each scenario, one after the other; 0 if all succeeded."""
    codes = []
    for request in requests:
        process = FORK.Process(target=_answer, args=(request,))
        process.start()
        process.join(TIMEOUT_S + 20.0)
        codes.append(process.exitcode)
        process.kill()
    return 0 if not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
