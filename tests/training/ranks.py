"""Run the scenarios below in 1, 2, 3 ... real ranks: `python ranks.py OUT WORLD [WORLD ...]`.

torch is imported once and the ranks are forked from here (nothing has used threads or autograd yet),
so all scenarios together cost one import. Rank r of world w writes `OUT/w<w>-r<r>.pt`, a dictionary
from scenario to result. Ranks meet through a file, so no port has to be free.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from elastic.base import config
from elastic.training import inner as inner_module
from elastic.training.inner import Inner
from elastic.training.model import build_model
from elastic.training.shard import compute_dtype_of, rows_of, shard, spoken_rows

TIMEOUT_S = 180.0
VOCAB, SEQ_LEN = 61, 12  # 61 rows: uneven for every number of ranks but one
DECODER = config.DecoderModel(
    d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=20, qk_norm=True, tied_head=True
)


class Odd(nn.Module):
    """Everything that is awkward to shard: tied, frozen, unused, one row, no dimension at all."""

    def __init__(self, *, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 6)
        self.frozen = nn.Embedding(seq_len, 6)
        self.frozen.weight.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.narrow = nn.Linear(6, 1)
        self.unused = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.frozen.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x * self.scale + self.narrow(x))


MODELS: dict[str, config.DecoderModel | config.PythonModel] = {
    "decoder": DECODER,
    "odd": config.PythonModel(kind="python", entry="ranks:Odd"),
}


def batches(seed: int, sizes: list[int]) -> list[np.ndarray]:
    """Random batches of these sizes, some of their targets padding, the same for every caller."""
    random = np.random.default_rng(seed)
    made = [random.integers(0, VOCAB, (size, SEQ_LEN + 1)) for size in sizes]
    for batch in made:
        lengths = random.integers(1, SEQ_LEN + 2, len(batch))
        batch[np.arange(SEQ_LEN + 1) >= lengths[:, None]] = -1
    return made


def make(model: str, rank: int, world_size: int, mesh: Any, dtype: str = "fp32", **changes: Any) -> Inner:
    """An `Inner` of this rank, batch 7, micro-batch 2."""
    cfg = config.Inner(
        **{"batch_sequences": 7, "micro_batch_sequences": 2, "compute_dtype": dtype, **changes}
    )
    built = build_model(MODELS[model], VOCAB, SEQ_LEN, seed=5)
    shard(built, mesh, compute_dtype_of(cfg.compute_dtype, "cpu"))
    return Inner(built, cfg, rank=rank, world_size=world_size, mesh=mesh)


def part(inner: Inner, tensors: dict[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    """What this rank would send: name -> (first row, rows)."""
    sent = {}
    for name, tensor in tensors.items():
        start, stop = spoken_rows(inner.parameters[name], inner.rank)
        if stop > start:
            sent[name] = (start, tensor.clone())
    return sent


def train(inner: Inner, seed: int, sizes: list[int]) -> list[tuple[float, float]]:
    """Steps on random batches; returns (norm, mean loss) of each."""
    seen = []
    for number, batch in enumerate(batches(seed, sizes)):
        inner.gradient(batch)
        norm = inner.clip()
        seen.append((norm, inner.batch_loss))
        inner.step(lr=3e-3 * (1 + number % 3))
    return seen


def moments_part(inner: Inner) -> list[dict[str, tuple[int, Tensor]]]:
    """Both moments as parts."""
    return [part(inner, {name: pair[i] for name, pair in inner.moments().items()}) for i in (0, 1)]


# ---------------------------------------------------------------------------------- scenarios


def agree(rank: int, world_size: int, mesh: Any) -> dict[str, Any]:
    """20 steps of both models on batches of 7 and fewer."""
    result = {}
    for model in MODELS:
        inner = make(model, rank, world_size, mesh)
        frozen = {n: p for n, p in inner.model.named_parameters() if not p.requires_grad}
        before = {name: p.detach().clone() for name, p in frozen.items()}
        seen = train(inner, 1, [7] * 15 + [1, 2, 3, 5, 7])
        inner.gradient(batches(3, [7])[0])
        result[model] = {
            "seen": seen,
            "gradient": part(inner, inner.gradients()),
            "parameters": part(inner, inner.local()),
            "moments": moments_part(inner),
            "shapes": inner.shapes,
            "rows": {name: rows_of(p) for name, p in inner.parameters.items()},
            "evaluation": inner.evaluate(batches(2, [5])[0]),
            "tiny_evaluation": inner.evaluate(batches(2, [1])[0]),
            "frozen_moved": [n for n in frozen if not torch.equal(_whole(before[n]), _whole(frozen[n]))],
            "frozen": sorted(frozen),
            "steps": inner.steps,
        }
    return result


def merged(rank: int, world_size: int, mesh: Any) -> dict[str, Any]:
    """Synchronous steps: the same whole gradient and norm for every island, cut into own rows."""
    inner = make("odd", rank, world_size, mesh)
    random = torch.Generator().manual_seed(7)
    for _ in range(30):
        rows = {}
        for name, shape in inner.shapes.items():
            whole = torch.randn(shape, generator=random)
            start, stop = rows_of(inner.parameters[name])
            rows[name] = whole[start:stop] if shape else whole
        inner.set_gradients(rows)
        inner.clip(norm=5.4321)
        inner.step(lr=1e-2)
    return {
        "shapes": inner.shapes,
        "parameters": part(inner, inner.local()),
        "moments": moments_part(inner),
    }


def poisoned(rank: int, world_size: int, mesh: Any) -> dict[str, Any]:
    """The last rank's gradient of one parameter turns into a NaN."""
    inner = make("decoder", rank, world_size, mesh)
    before = {name: t.clone() for name, t in inner.local().items()}
    inner.gradient(batches(1, [7])[0])
    if rank == world_size - 1:
        inner.gradients()["blocks.1.ffn.down.weight"][-1, 0] = float("nan")
    try:
        inner.clip()
        message = ""
    except inner_module.NonFiniteGradient as error:
        message = str(error)
    same = all(torch.equal(before[name], tensor) for name, tensor in inner.local().items())
    return {"message": message, "same": same, "steps": inner.steps}


def bf16(rank: int, world_size: int, mesh: Any) -> dict[str, Any]:
    """A bf16 pass keeps fp32 master weights, gradients and moments."""
    inner = make("decoder", rank, world_size, mesh, dtype="bf16")
    seen = train(inner, 1, [7] * 10)
    inner.gradient(batches(3, [7])[0])
    tensors = [*inner.local().values(), *inner.gradients().values()]
    tensors += [moment for pair in inner.moments().values() for moment in pair]
    return {"seen": seen, "dtypes": sorted({str(t.dtype) for t in tensors})}


def reshard(rank: int, world_size: int, mesh: Any) -> dict[str, Any]:
    """3 steps alone, then 3 more by this world from the state of the first 3."""
    alone = make("decoder", 0, 1, None)
    train(alone, 1, [7] * 3)
    inner = make("decoder", rank, world_size, mesh)
    rows = {name: rows_of(parameter) for name, parameter in inner.parameters.items()}
    for name, tensor in inner.local().items():
        start, stop = rows[name]
        tensor.copy_(alone.local()[name][start:stop])
    moments = {
        name: (first[slice(*rows[name])], second[slice(*rows[name])])
        for name, (first, second) in alone.moments().items()
    }
    inner.load_moments(moments, alone.steps)
    train(inner, 9, [7] * 3)
    return {"shapes": inner.shapes, "parameters": part(inner, inner.local()), "steps": inner.steps}


SCENARIOS = {f.__name__: f for f in (agree, merged, poisoned, bf16, reshard)}

# --------------------------------------------------------------------------------- processes


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _rank(out: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    mesh = None
    if world_size > 1:
        meeting = f"file://{out.absolute()}/meet-{world_size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
    result = {name: scenario(rank, world_size, mesh) for name, scenario in SCENARIOS.items()}
    torch.save(result, out / f"w{world_size}-r{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


def main(out: Path, worlds: list[int]) -> int:
    """Fork the ranks of each world, one world after the other; 0 if all succeeded."""
    fork = multiprocessing.get_context("fork")
    for world_size in worlds:
        ranks = [fork.Process(target=_rank, args=(out, rank, world_size)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_S)
        codes = [process.exitcode for process in ranks]
        if any(code != 0 for code in codes):
            for process in ranks:
                process.kill()
            print(f"world {world_size}: exit codes {codes}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(world) for world in sys.argv[2:]]))
