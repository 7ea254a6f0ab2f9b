"""Ray's actor decorator without its annotations, which contradict what Ray documents.

In Ray 2.60 `ray.remote` is annotated without the options of actors, and a decorated class as the bare
class, without `.options()` and `.remote()`.
"""

from __future__ import annotations

from typing import Any

import ray

remote: Any = ray.remote
