"""The real command line on a tiny job, and a look at the processes that it starts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
FLEET = REPOSITORY / "cluster_configs" / "local.yaml"
PATIENCE_S = 400
"""Far above what anything here takes; a busy machine must not fail a test."""

JOB = """\
name: tiny
model: {{kind: decoder, d_model: 32, num_layers: 1, num_heads: 2}}
data: {{sources: [{corpus}], validation_share: 0.2, seq_len: 32}}
budget: {{tokens: 60_000}}
inner: {{batch_sequences: 4, lr: 3e-3}}
outer: {{preset: diloco, sync_every: 5, island_timeout_s: 60}}
validation: {{sequences: 8}}
logging: {{every_s: 1, tensorboard: false}}
"""


@dataclass
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    command: str


@dataclass
class Driver:
    """One `elastic train`, running or ended."""

    process: subprocess.Popen[bytes]
    run_folder: Path
    out_file: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def out(self) -> str:
        return self.out_file.read_text("utf-8")

    @property
    def err(self) -> str:
        return self.out_file.with_suffix(".err").read_text("utf-8")

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.run_folder / "result.json").read_text("utf-8"))

    def until(self, happened: Callable[[], object]) -> None:
        """Wait until something is so; fails if the driver ends before that."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, self.transcript()
            assert time.monotonic() < deadline, self.transcript()
            time.sleep(0.05)

    def until_says(self, text: str) -> None:
        self.until(lambda: text in self.out)

    def until_records(self, count: int) -> None:
        """Wait for `count` durable records of the synchronizer."""
        self.until(lambda: len(list(self.run_folder.glob("state/*.json"))) >= count)

    def send(self, number: signal.Signals) -> None:
        """A signal to the whole process group, as a terminal sends it."""
        os.killpg(self.process.pid, number)

    def ends(self) -> int:
        """Its exit code, when it has one."""
        self.process.wait(PATIENCE_S)
        return self.process.returncode

    def transcript(self) -> str:
        return f"--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass
class Elastic:
    """Calls the command line in the repository's folder, as a user does."""

    job_file: Path
    folder: Path
    environment: dict[str, str]
    calls: int = 0

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            [sys.executable, "-m", "elastic", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def start(
        self,
        run_folder: Path,
        *overrides: str,
        job_file: Path | None = None,
        fleet: Path = FLEET,
        folder: Path = REPOSITORY,
    ) -> Driver:
        """Start `elastic train` in `folder`: the tiny job on the local fleet if nothing else is given."""
        self.calls += 1
        environment = {**os.environ, **self.environment}
        del environment["RAY_AUTH_MODE"]  # as a user has it: a Ray of our own brings its own token
        out_file = self.folder / f"driver{self.calls}.out"
        with open(out_file, "wb") as out, open(out_file.with_suffix(".err"), "wb") as err:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "elastic", "train", str(job_file or self.job_file)),
                    *("--fleet", str(fleet), f"run_folder={run_folder}", *overrides),
                ],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return Driver(process, run_folder, out_file)

    def train(self, run_folder: Path, *overrides: str, **options: Path) -> Driver:
        """`elastic train` to its end."""
        driver = self.start(run_folder, *overrides, **options)
        driver.ends()
        return driver


def processes() -> list[Process]:
    """Processes of this test's Ray, known by the RAY_TMPDIR that they were started with."""
    needle = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                stat = (entry / "stat").read_text()
                parent = int(stat[stat.rindex(")") + 2 :].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(Process(int(entry.name), parent, command.strip()))
        except OSError:  # not ours to read, or just ended
            continue
    return [process for process in found if process.command]  # a zombie has no command


def left_over(within_s: float) -> list[Process]:
    """Processes that are still there after `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few small text files with something to learn in them."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["island", "region", "worker", "step", "delta", "outer", "inner", "merge", "lease", "drift"]
    choose = random.Random(0)
    for number in range(20):
        sentences = (" ".join(choose.choices(words, k=8)) for _ in range(250))
        (folder / f"part-{number:02}.txt").write_text(".\n".join(sentences))
    return folder


@pytest.fixture(scope="session")
def elastic(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """The command line with the tiny job."""
    folder = tmp_path_factory.mktemp("elastic")
    job_file = folder / "tiny.yaml"
    job_file.write_text(JOB.format(corpus=corpus))
    return Elastic(job_file, folder, {"PYTHONPATH": str(REPOSITORY)})


class Look:
    """The functions above, for tests: test modules cannot import from each other."""

    processes = staticmethod(processes)
    left_over = staticmethod(left_over)


@pytest.fixture(scope="session")
def look() -> type[Look]:
    """Look at processes."""
    return Look
