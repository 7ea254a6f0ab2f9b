"""Sharding inside an island: FSDP2 per block, and who holds which rows of a parameter.

FSDP2 cuts every parameter along dim 0 as `torch.chunk` does: `ceil(rows / world)` rows a rank, fewer
or none on the last ones. Gradients are **sums** over ranks (divide factor 1): the inner optimiser
scales by the tokens of the whole batch, so that shares may be uneven. Parameters without dimensions
cannot be cut; they stay whole on every rank, and rank 0 speaks for them (`spoken_rows`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from elastic.training.model import blocks_of


def compute_dtype_of(choice: Literal["auto", "fp32", "bf16"], device: torch.device | str) -> torch.dtype:
    """Type of the forward and backward pass; `auto` is bf16 on accelerators and fp32 on the CPU."""
    if choice == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return torch.bfloat16 if choice == "bf16" else torch.float32


def shard(model: nn.Module, mesh: DeviceMesh | None, compute_dtype: torch.dtype) -> None:
    """Shard `model` in place over the one-dimensional `mesh`: each block, then the rest.

    Master weights stay fp32; with bf16 the pass computes in bf16 and gradients are reduced in fp32.
    Without a mesh the model stays as it is (`Inner` then uses autocast for bf16). Frozen parameters
    stay frozen; tied ones stay tied.
    """
    if mesh is None:
        return
    if mesh.ndim != 1:
        raise ValueError(f"shard needs a mesh of one dimension, got {mesh.ndim}: {mesh}")
    whole = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    device = (
        torch.device(mesh.device_type) if mesh.device_type == "cpu" else _current_device(mesh.device_type)
    )
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    policy = MixedPrecisionPolicy()
    if compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in order of definition; tied ones once, by their first name."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=True) if p.requires_grad}


def local_of(parameter: Tensor) -> Tensor:
    """The rows this rank holds, sharing memory with `parameter`: write them in place."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def rows_of(parameter: Tensor) -> tuple[int, int]:
    """Rows of dim 0 held by this rank, half-open; (0, 1) for a tensor without dimensions."""
    rows = parameter.shape[0] if parameter.ndim else 1
    if not isinstance(parameter, DTensor):
        return 0, rows
    return chunk(rows, parameter.device_mesh.size(), parameter.device_mesh.get_local_rank())


def spoken_rows(parameter: Tensor, rank: int) -> tuple[int, int]:
    """Rows this rank sends: over all ranks every row exactly once. Those of `rows_of`, but only rank
    0 speaks for a parameter that every rank holds whole.
    """
    if not isinstance(parameter, DTensor) and rank != 0:
        return 0, 0
    return rows_of(parameter)


def chunk(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The rows of rank `rank` of `world_size`, as `torch.chunk` and FSDP2 cut them."""
    size = -(-rows // world_size)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Dress `local` rows (a moment, say) as a tensor sharded like `parameter`; shares memory."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _current_device(kind: str) -> torch.device:
    return torch.device(kind, torch.get_device_module(kind).current_device())
