"""`elastic`: one model, trained across many clusters.

The public names are imported when they are first used, so that `import elastic` is instant and reading a
configuration needs neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.base.config import Fleet, Job
    from elastic.base.configfile import load_fleet, load_job
    from elastic.policy.plan import make_plan as plan
    from elastic.runtime.controller import Result, train

__version__ = "0.1.0"
__all__ = ["Fleet", "Job", "Result", "load_fleet", "load_job", "plan", "train"]

_HOMES = {
    "Fleet": ("elastic.base.config", "Fleet"),
    "Job": ("elastic.base.config", "Job"),
    "load_fleet": ("elastic.base.configfile", "load_fleet"),
    "load_job": ("elastic.base.configfile", "load_job"),
    "plan": ("elastic.policy.plan", "make_plan"),
    "train": ("elastic.runtime.controller", "train"),
    "Result": ("elastic.runtime.controller", "Result"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastic' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
