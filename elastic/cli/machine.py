"""Checks of this machine for `elastic doctor`: each takes what was seen and returns a `Check`.

Reading and judging are apart, so that every judgement is tested with numbers of machines we do not have.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import locale
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elastic.views.format import bytes_text

GIB = 2**30
RAY_SERIES = "2.60"
_DASHBOARD = ("aiohttp", "aiohttp_cors", "prometheus_client")
"""Modules of `ray[default]`."""

EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "tiktoken": "tiktoken",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "matplotlib": "report",
    "wandb": "wandb",
}


@dataclass(frozen=True)
class Check:
    """One line of the report; `fix` says what to do about a `warn` or a `fail`."""

    name: str
    status: Literal["ok", "warn", "fail"]
    saw: str
    fix: str = ""


def ok_or(name: str, good: bool, saw: str, fix: str, otherwise: Literal["warn", "fail"] = "warn") -> Check:
    """`ok` if `good`, else `otherwise` with the fix."""
    return Check(name, "ok", saw) if good else Check(name, otherwise, saw, fix)


# -------------------------------------------------------------------------------------- software


def check_python(version: tuple[int, ...]) -> Check:
    """3.10 to 3.13."""
    good = (3, 10) <= version[:2] <= (3, 13)
    saw = ".".join(map(str, version[:3]))
    return ok_or("python", good, saw, "use Python 3.10 to 3.13", "fail")


def installed(package: str) -> str | None:
    """Version of an installed distribution, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_there(name: str, version: str | None) -> Check:
    return ok_or(name, version is not None, version or "not installed", f"pip install {name}", "fail")


def check_packages(versions: dict[str, str | None], dashboard: bool) -> list[Check]:
    """What must be installed; `dashboard`: the packages of `ray[default]` are there."""
    checks = [
        Check("elastic", "ok", versions["elastic-islands"] or "from source, not installed"),
        *(_check_there(name, versions[name]) for name in ("torch", "pyarrow")),
    ]
    ray = versions["ray"]
    if ray is None:
        return [*checks, Check("ray", "fail", "not installed", "pip install 'ray[default,train]'")]
    if not dashboard:
        fix = "pip install 'ray[default,train]': jobs and the clean-up after a lost island need it"
        return [*checks, Check("ray", "fail", f"{ray} without its dashboard", fix)]
    fix = f"elastic is tested with Ray {RAY_SERIES}: pip install -c constraints.txt elastic-islands"
    return [*checks, ok_or("ray", ray.startswith(RAY_SERIES + "."), ray, fix)]


def check_extras(versions: dict[str, str | None]) -> Check:
    """Optional packages: there or not, both are fine."""
    parts = (f"{p} {versions[p] or f'absent (extra {extra})'}" for p, extra in EXTRAS.items())
    return Check("extras", "ok", ", ".join(parts))


# -------------------------------------------------------------------------------------- hardware


def check_cpus(logical: int, usable: int, quota: float | None) -> Check:
    """Ray counts all CPUs of the machine unless it is told; a container may be allowed fewer."""
    limit = min(float(usable), quota if quota is not None else float(usable))
    saw = f"{logical} CPUs, {limit:g} usable"
    fix = f"start Ray with --num-cpus {int(max(1, limit))}: it would count {logical}"
    return ok_or("cpus", limit >= logical, saw, fix)


def check_memory(available_bytes: int, islands: int, workers: int) -> Check:
    """Against what Ray's own processes take: 1 GiB, 1 GiB an island, 0.6 GiB a small worker."""
    needed = round(GIB * (1 + islands + 0.6 * workers))
    saw = (
        f"{bytes_text(available_bytes)} available, about {bytes_text(needed)} wanted by Ray and small workers"
    )
    return ok_or("memory", available_bytes >= needed, saw, "fewer islands or workers here, or more memory")


def check_shm(total_bytes: int | None) -> Check:
    """Ray's object store lies in shared memory."""
    if total_bytes is None:
        return Check("/dev/shm", "warn", "not there", "Ray will use its temporary folder, which is slower")
    fix = "docker run --shm-size=4g, or an emptyDir with medium: Memory mounted at /dev/shm"
    return ok_or("/dev/shm", total_bytes >= GIB, bytes_text(total_bytes), fix)


def check_disk(name: str, folder: Path, total_bytes: int, free_bytes: int) -> Check:
    """Free space; Ray stops writing objects to a disk that is 95 % full."""
    saw = f"{bytes_text(free_bytes)} free in {folder}"
    good = free_bytes >= 5 * GIB and free_bytes > 0.05 * total_bytes
    return ok_or(name, good, saw, "free at least 5 GiB and 5 % of the disk, or use another folder")


def check_open_files(soft_limit: int) -> Check:
    """Ray keeps many sockets open."""
    good = soft_limit == resource.RLIM_INFINITY or soft_limit >= 4096
    return ok_or("open files", good, f"limit {soft_limit}", "ulimit -n 65536")


def check_devices(answer: dict | None, problem: str, driver_files: bool) -> Check:
    """torch's accelerators; `driver_files`: the NVIDIA driver is on this machine."""
    if answer is None:
        return Check("devices", "fail", problem, "torch cannot be imported; reinstall it: pip install torch")
    found = answer["devices"]
    if not found:
        saw = f"CPU only (torch {answer['torch']})"
        fix = "there is an NVIDIA driver: install a CUDA build of torch, and see what nvidia-smi says"
        return ok_or("devices", not driver_files, saw, fix)
    names = (f"{d['name']} {bytes_text(d['memory_bytes'])}{'' if d['bf16'] else ' no bf16'}" for d in found)
    return Check("devices", "ok", ", ".join(names))


# -------------------------------------------------------------------------------- system settings


def check_write(folder: Path, wall_clock_s: float) -> Check:
    """Write, read back and remove a file in the working folder; its time must be near this host's."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".elastic-doctor-") as file:
            file.write(b"probe")
            file.flush()
            read_back, skew_s = Path(file.name).read_bytes(), os.stat(file.name).st_mtime - wall_clock_s
    except OSError as error:
        return Check("write probe", "fail", f"{folder}: {error}", "work in a folder that you may write to")
    if read_back != b"probe":
        return Check("write probe", "fail", f"{folder} returns other bytes", "use another file system")
    saw = f"{folder} is writable" + ("" if abs(skew_s) < 5 else f"; its clock differs by {skew_s:+.0f} s")
    return ok_or("write probe", abs(skew_s) < 5, saw, "set the clocks; times in listings will look odd")


def check_clock(wall_clock_s: float) -> Check:
    """A clock that was never set breaks TLS to buckets."""
    year = time.gmtime(wall_clock_s).tm_year
    return ok_or("clock", year >= 2025, f"year {year}", "set the clock (NTP): TLS will be refused")


def check_locale(encoding: str) -> Check:
    """Text files are read as UTF-8 everywhere, but output may not be."""
    good = encoding.lower().replace("-", "") == "utf8"
    return ok_or("locale", good, encoding, "export LC_ALL=C.UTF-8")


def check_hostname(name: str, address: str | None) -> Check:
    """Ray asks for the address of its own host."""
    fix = f"add '127.0.1.1 {name}' to /etc/hosts"
    return ok_or("host name", address is not None, f"{name} is {address or 'unknown'}", fix)


def check_auth(mode: str | None, has_token: bool, existing_cluster: bool) -> Check:
    """RAY_AUTH_MODE: without a token anybody who reaches the ports of a cluster runs code on it."""
    name, saw = "RAY_AUTH_MODE", mode or "not set: Ray uses tokens, and writes ~/.ray/auth_token"
    if mode not in (None, "token", "disabled"):
        return Check(name, "warn", saw, "Ray knows 'token' and 'disabled'")
    if mode == "disabled":
        fix = "whoever reaches the cluster's ports runs code on it: use tokens, or close the ports"
        return ok_or(name, not existing_cluster, saw, fix)
    if existing_cluster and not has_token:
        return Check(name, "warn", f"{saw}; no token here", "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH")
    return Check(name, "ok", saw)


# --------------------------------------------------------------------------------------- reading


def _read_number(path: str) -> float | None:
    """The first word of a file of the control group; None if absent or without a limit."""
    try:
        word = Path(path).read_text().split()[0]
    except (OSError, IndexError):
        return None
    return float(word) if word.isdigit() else None


def cpu_quota() -> float | None:
    """CPUs that the control group allows, None without a limit."""
    quota = _read_number("/sys/fs/cgroup/cpu.max")
    if quota is None:
        return None
    return quota / float(Path("/sys/fs/cgroup/cpu.max").read_text().split()[1])


def available_memory_bytes() -> int:
    """Free memory of the machine, or what the control group leaves of it."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    return available if limit is None else min(available, int(limit - (used or 0.0)))


def _own_address(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def machine_checks(islands: int, workers: int) -> list[Check]:
    """All checks of this machine that need neither torch nor Ray."""
    here, temporary = Path.cwd(), Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    shm = Path("/dev/shm")
    names = ("elastic-islands", "torch", "ray", "pyarrow", *EXTRAS)
    versions = {name: installed(name) for name in names}
    dashboard = all(importlib.util.find_spec(name) for name in _DASHBOARD)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    checks = [
        check_python(sys.version_info[:3]),
        *check_packages(versions, dashboard),
        check_extras(versions),
        check_cpus(os.cpu_count() or 1, usable, cpu_quota()),
    ]
    if Path("/proc/meminfo").exists():
        checks.append(check_memory(available_memory_bytes(), islands, workers))
    checks.append(check_shm(shutil.disk_usage(shm).total if shm.is_dir() else None))
    for name, folder in (("disk", here), ("disk of Ray", temporary)):
        usage = shutil.disk_usage(folder)
        checks.append(check_disk(name, folder, usage.total, usage.free))
    host = socket.gethostname()
    return [
        *checks,
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_write(here, time.time()),
        check_clock(time.time()),
        check_locale(locale.getpreferredencoding(False)),
        check_hostname(host, _own_address(host)),
    ]
