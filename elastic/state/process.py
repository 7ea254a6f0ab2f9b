"""Who a process is, so that another process on the same machine can tell whether it is surely gone.

A process id alone is not enough: ids are reused, and containers on one machine have id spaces of
their own. So an identity also holds the boot, the pid namespace, and the start time of the process.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one machine. `start` is "" where the system does not tell."""

    host: str
    machine: str
    pid: int
    start: str

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, object]) -> ProcessIdentity:
        """Read what `to_json` wrote; raises KeyError, TypeError or ValueError on anything else."""
        return ProcessIdentity(
            host=str(fields["host"]),
            machine=str(fields["machine"]),
            pid=int(str(fields["pid"])),
            start=str(fields["start"]),
        )

    def surely_dead(self) -> bool:
        """True only if this process ran on this machine and is gone; False also means "cannot tell"."""
        if self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # somebody else's process has this id now, or it is ours under another user
        start = _start_of(self.pid)
        return bool(self.start) and bool(start) and start != self.start


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    pid = os.getpid()
    return ProcessIdentity(platform.node(), _machine(), pid, _start_of(pid))


def _machine() -> str:
    """Host name, boot and pid namespace: equal only where process ids mean the same processes."""
    parts = [platform.node()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("no-proc")  # macOS: one id space per host
    return "/".join(parts)


def _start_of(pid: int) -> str:
    """Start time of a process in clock ticks since boot, "" if unknown. A zombie has ended: "zombie"."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat[stat.rindex(")") + 2 :].split()  # the name in brackets may hold blanks
    return "zombie" if fields[0] in ("Z", "X") else fields[19]
