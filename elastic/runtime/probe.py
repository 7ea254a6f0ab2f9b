"""A look at torch's devices or at a Ray cluster, as JSON on standard output.

`elastic doctor` runs it as a process of its own, `python -m elastic.runtime.probe devices` or
`... cluster ADDRESS`, so that an import that crashes or a connection that hangs ends with a deadline.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict


def devices() -> dict[str, object]:
    """torch's version and its accelerators: name, memory, whether bf16 is computed natively."""
    import torch

    found: list[dict[str, object]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
            found.append({"name": properties.name, "memory_bytes": properties.total_memory, "bf16": bf16})
    return {"torch": torch.__version__, "cuda_build": torch.version.cuda, "devices": found}


def cluster(address: str) -> dict[str, object]:
    """Ray's version and the cluster's nodes, each with the fields of a `NodeRecord`."""
    import ray

    from elastic.runtime.cluster import nodes

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        return {"ray": ray.__version__, "nodes": [asdict(node) for node in nodes()]}
    finally:
        ray.shutdown()


def main(arguments: list[str]) -> None:
    """Run one probe and write its answer as the last line of standard output."""
    answer = devices() if arguments == ["devices"] else cluster(arguments[1])
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
