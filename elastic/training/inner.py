"""The inner optimiser: one rank's part of one island's step.

An island's batch is fixed in sequences, whatever its number of workers. Each rank takes its share,
cuts it into micro-batches, and scales its loss by the tokens of the **whole** batch, so that the sum
over ranks is the gradient of one big batch: shares may be uneven, sequences may be padded, a rank
may have nothing. All ranks run the same number of passes, because FSDP's collectives must match.

    gradient(batch) -> clip() -> step(lr)                       an inner step
    gradient(batch) -> gradients() ... set_gradients(merged) -> clip(norm) -> step(lr)     synchronous
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastic.base import config
from elastic.base.errors import ElasticError
from elastic.training.adamw import AdamW
from elastic.training.model import seeded
from elastic.training.passes import num_targets, passes
from elastic.training.shard import compute_dtype_of, local_of, parameters_of

_IGNORED = -100  # cross_entropy's mark for a target that does not count


class NonFiniteGradient(ElasticError):
    """A gradient holds an Inf or a NaN; nothing was stepped, on any rank.

    Example: `blocks.3.ffn.down.weight` overflows at step 912 because the learning rate is too high.
    """


class Loss(NamedTuple):
    """Sum of the token losses in nats (not yet read from the device), and how many tokens."""

    total: Tensor
    tokens: int


class Inner:
    """One rank of an island: gradients of the island's batch, clipping, AdamW, evaluation.

    `model` is built by `build_model` and, with a `mesh`, already sharded by `shard`. Everything that
    is read or written by name are this rank's own rows, as plain fp32 tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: config.Inner,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        mesh: DeviceMesh | None = None,
        seed: int = 0,
    ) -> None:
        """`seed` fixes the dropout of models that have it; give every island its own."""
        if (mesh is not None) != isinstance(model, FSDPModule):
            raise ValueError("call shard(model, mesh, ...) before Inner, with the same mesh (or none)")
        if mesh is None and world_size != 1:
            raise ValueError(f"{world_size} workers need a mesh")
        self.device = torch.device(device)
        self.model = model if mesh is not None else model.to(self.device)
        self.rank, self.world_size = rank, world_size
        self._cfg, self._seed = cfg, seed
        self._micro_batch = cfg.micro_batch_sequences or min(cfg.batch_sequences, 32)
        self._group = mesh.get_group() if mesh is not None else None
        self._syncs = True
        self._autocasts = mesh is None and compute_dtype_of(cfg.compute_dtype, device) == torch.bfloat16
        self.parameters = parameters_of(self.model)
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self._optimizer = AdamW(
            self.local(),
            decayed=frozenset(name for name, p in self.parameters.items() if p.ndim >= 2),
            betas=cfg.betas,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
        )
        self._gradients: dict[str, Tensor] = {}
        self._loss = torch.zeros((), device=self.device)
        self.batch_tokens = 0
        """Tokens of the last batch, all ranks together."""
        self.batch_loss = math.nan
        """Mean loss of the last batch in nats per token, all ranks together; known after `clip()`."""

    @property
    def steps(self) -> int:
        """AdamW steps taken, over restarts too."""
        return self._optimizer.steps

    def local(self) -> dict[str, Tensor]:
        """This rank's rows of all trainable parameters; write them in place."""
        return {name: local_of(parameter) for name, parameter in self.parameters.items()}

    # ---------------------------------------------------------------------------- one step

    def gradient(self, batch: np.ndarray) -> Loss:
        """Gradient of the mean token loss of the whole `batch` [b, T+1], the same for all ranks.

        Every rank is given the whole batch and takes its share. A target below 0 is padding: it adds
        nothing and does not count. Returns the loss sum and the tokens of **this rank's share**;
        nothing is read from the device. After `clip()`, `batch_loss` is that of the whole batch.
        """
        if not self.model.training:
            self.model.train()
        self.batch_tokens, self.batch_loss = num_targets(batch), math.nan
        total, tokens = torch.zeros((), device=self.device), 0
        todo = passes(len(batch), self.world_size, self.rank, self._micro_batch)
        with self._random_state():
            for number, one in enumerate(todo, start=1):
                self._sync_gradients(number == len(todo))
                rows = batch[one.start : one.stop]
                loss = self._loss_sum(rows)
                weight = 1.0 / self.batch_tokens if one.counts and self.batch_tokens else 0.0
                (loss * weight).backward()
                if one.counts:
                    total += loss.detach()
                    tokens += num_targets(rows)
        self._collect()
        self._loss = total
        return Loss(total, tokens)

    @torch.no_grad()
    def clip(self, norm: float | None = None) -> float:
        """Scale the gradient down to `clip_norm` if its global norm is larger; returns that norm.

        One small all-reduce and one read from the device, which brings `batch_loss` along. A gradient
        that is not finite raises NonFiniteGradient on all ranks alike, with the first bad parameter's
        name, before any step. `norm` is given for a gradient that was merged elsewhere, so that all
        islands scale by the same bits.
        """
        if norm is None:
            norm = self._global_norm()
        elif not math.isfinite(norm):
            raise self._not_finite("the merged gradient")
        coefficient = self._cfg.clip_norm / (norm + 1e-6)
        if coefficient < 1.0:
            torch._foreach_mul_(list(self._gradients.values()), coefficient)
        return norm

    def step(self, lr: float) -> None:
        """One AdamW step with learning rate `lr` on this rank's rows."""
        if not self._gradients:
            raise RuntimeError("step() needs gradient() or set_gradients() before it")
        self._optimizer.parameters = self.local()  # FSDP may move a shard once, in its first pass
        self._optimizer.step(self._gradients, lr)
        self._gradients = {}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's rows of the gradient, fp32, not copied; zeros where nothing was used."""
        return dict(self._gradients)

    def set_gradients(self, rows: Mapping[str, Tensor]) -> None:
        """Replace the gradient by these rows (merged over islands). Names and shapes must match."""
        _check(rows, self.local(), "gradients")
        self._gradients = {
            name: rows[name].to(device=self.device, dtype=torch.float32, copy=True)
            for name in self.parameters
        }

    # ------------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def evaluate(self, batch: np.ndarray) -> tuple[float, int]:
        """Loss sum in nats and tokens of `batch` [b, T+1], over all ranks; all ranks must call it."""
        self.model.eval()
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for one in passes(len(batch), self.world_size, self.rank, self._micro_batch):
            rows = batch[one.start : one.stop]
            loss = self._loss_sum(rows)
            if one.counts:
                total += loss
                tokens += num_targets(rows)
        if self._group is None:
            return total.item(), tokens
        sums = torch.stack((total, torch.tensor(tokens, dtype=torch.float64, device=self.device)))
        dist.all_reduce(sums, group=self._group)
        loss_sum, all_tokens = sums.tolist()
        return loss_sum, int(all_tokens)

    # ---------------------------------------------------------------------------- moments

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """AdamW's (exp_avg, exp_avg_sq) of this rank's rows, fp32, not copied. See also `steps`."""
        first, second = self._optimizer.exp_avg, self._optimizer.exp_avg_sq
        return {name: (first[name], second[name]) for name in self.parameters}

    @torch.no_grad()
    def load_moments(self, moments: Mapping[str, tuple[Tensor, Tensor]], steps: int) -> None:
        """Take over moments and the count of steps; every name must be there, with its shape."""
        for index, kept in enumerate((self._optimizer.exp_avg, self._optimizer.exp_avg_sq)):
            given = {name: pair[index] for name, pair in moments.items()}
            _check(given, kept, "moments")
            for name, tensor in kept.items():
                tensor.copy_(given[name])
        self._optimizer.steps = steps

    # ---------------------------------------------------------------------------- private

    def _loss_sum(self, rows: np.ndarray) -> Tensor:
        """Cross-entropy in nats, summed over the tokens of sequences [b, T+1], in fp32."""
        sequences = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(self.device)
        tokens, targets = sequences[:, :-1].clamp(min=0), sequences[:, 1:]
        with self._autocast():
            logits = self.model(tokens)
        targets = targets.masked_fill(targets < 0, _IGNORED)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
        )

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocasts:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    @contextmanager
    def _random_state(self) -> Generator[None, None, None]:
        """Dropout depends on (seed, step, rank) alone, so a resumed run needs no stored random state."""
        seed = int(
            np.random.SeedSequence((self._seed, self.steps, self.rank)).generate_state(1, np.uint64)[0]
        )
        if self.device.type == "cpu":
            with seeded(seed):
                yield
            return
        device = torch.get_device_module(self.device)
        with torch.random.fork_rng(devices=[device.current_device()], device_type=self.device.type):
            torch.manual_seed(seed)
            yield

    def _sync_gradients(self, needed: bool) -> None:
        """Let FSDP reduce gradients in the last pass only; before it they add up in full, unsharded."""
        if isinstance(self.model, FSDPModule) and needed != self._syncs:
            self.model.set_requires_gradient_sync(needed)
            self._syncs = needed

    @torch.no_grad()
    def _collect(self) -> None:
        """Move this rank's rows of `.grad` into plain tensors; sum those of unsharded parameters."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:  # not used by the model
                self._gradients[name] = torch.zeros_like(local_of(parameter))
                continue
            self._gradients[name] = local_of(parameter.grad)
            parameter.grad = None
            if self._group is not None and not isinstance(parameter, DTensor):
                dist.all_reduce(self._gradients[name], group=self._group)

    def _global_norm(self) -> float:
        squares = torch.stack(torch._foreach_norm(list(self._gradients.values()))).double().square()
        if self.rank != 0:  # a parameter that every rank holds whole counts once
            whole = [not isinstance(parameter, DTensor) for parameter in self.parameters.values()]
            squares = squares.masked_fill(torch.tensor(whole, device=self.device), 0.0)
        sums = torch.cat((squares, self._loss.double()[None]))
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        *values, loss = sums.tolist()
        bad = [name for name, value in zip(self.parameters, values, strict=True) if not math.isfinite(value)]
        if bad:
            raise self._not_finite(f"{bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else ""))
        self.batch_loss = loss / self.batch_tokens if self.batch_tokens else math.nan
        return math.sqrt(math.fsum(values))

    def _not_finite(self, where: str) -> NonFiniteGradient:
        return NonFiniteGradient(
            "the gradient is not finite; no step was taken",
            where=where,
            saw=f"Inf or NaN at inner step {self.steps + 1}",
            fix="lower inner.lr or inner.clip_norm, or look at the batch of this step",
        )


def _check(given: Mapping[str, Tensor], held: Mapping[str, Tensor], what: str) -> None:
    """Refuse a set of tensors that does not fill `held` exactly."""
    missing, unknown = sorted(held.keys() - given.keys()), sorted(given.keys() - held.keys())
    if missing or unknown:
        raise ElasticError(
            f"{what} do not match the model's trainable parameters",
            saw=f"missing {missing[:3]}, unknown {unknown[:3]}",
            fix="load what the same model saved",
        )
    for name, tensor in held.items():
        if given[name].shape != tensor.shape:
            raise ElasticError(
                f"{what} have other rows than this rank holds",
                where=name,
                saw=f"{list(given[name].shape)}, this rank holds {list(tensor.shape)}",
                fix="cut the rows with rows_of()",
            )
