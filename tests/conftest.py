"""What every test can count on: tests that start Ray get a home and a temporary folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RAY_MARKS = {"ray", "drill", "wan"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test without a mark: `make test` chooses by marks and would never run it."""
    known = {"unit", *RAY_MARKS}
    unmarked = [item.nodeid for item in items if not known & {mark.name for mark in item.iter_markers()}]
    if unmarked:
        raise pytest.UsageError("mark these unit, ray, drill or wan: " + ", ".join(unmarked))


@contextlib.contextmanager
def isolated_ray() -> Iterator[Path]:
    """A HOME and a temporary folder that no other Ray on this machine uses; processes left in it are ended.

    Ray writes a token into HOME that changes what later clusters of that HOME ask for. The folder's name
    is short because Ray puts sockets deep inside it and a socket's path has at most 107 characters.
    """
    short = "/tmp" if os.path.isdir("/tmp") else None
    folder = Path(tempfile.mkdtemp(prefix="el", dir=short))
    home = folder / "home"
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # loopback clusters that live for one test
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.delenv("RAY_AUTH_TOKEN", raising=False)
        try:
            yield folder
        finally:
            ray = sys.modules.get("ray")
            if ray is not None and ray.is_initialized():
                ray.shutdown()
            _end_processes_of(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _end_processes_of(folder: Path) -> None:
    """Kill what a failed test left behind, known by the RAY_TMPDIR it was started with."""
    needle = f"RAY_TMPDIR={folder}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours to read, or just ended
            if int(entry.name) != os.getpid() and needle in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def shared_ray_home() -> Iterator[Path]:
    """One isolated Ray home for all tests of a module: ask for it in a module-scoped cluster fixture."""
    with isolated_ray() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _own_ray_home(request: pytest.FixtureRequest) -> Iterator[None]:
    marks = {mark.name for mark in request.node.iter_markers()}
    if not marks & RAY_MARKS or "shared_ray_home" in request.fixturenames:
        yield
        return
    with isolated_ray():
        yield


@pytest.fixture
def ray_home(_own_ray_home: None) -> Path:
    """The folder that this Ray test has for itself."""
    return Path(os.environ["RAY_TMPDIR"])
