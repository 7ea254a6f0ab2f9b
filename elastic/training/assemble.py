"""Tensors that come in parts, one part per rank: every row exactly once, else an error with its name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic.base.errors import ElasticError

Tensors = dict[str, Tensor]
Part = Mapping[str, tuple[int, Tensor]]
"""The rows that one rank sends: name -> (first row, rows). It may hold no rows of a tensor."""


class MergeError(ElasticError):
    """Contributions or parts do not fit together; names the first tensor that is wrong.

    Example: ranks 0 and 1 of island `eu` both sent rows 0-64 of `embedding.weight`.
    """


def assemble(parts: Sequence[Part], shapes: Mapping[str, Sequence[int]]) -> Tensors:
    """Put the ranks' parts together.

    `shapes` are the whole tensors'. Every row of every tensor must come exactly once, else MergeError
    with its name. A tensor without dimensions is one row.
    """
    check_names(parts, shapes)
    whole: Tensors = {}
    for name, shape in shapes.items():
        pieces = [rows for _, rows in pieces_of(name, parts, shape)]
        if not pieces:
            whole[name] = torch.zeros(tuple(shape))
        else:
            whole[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole


def check_names(parts: Sequence[Part], shapes: Mapping[str, Sequence[int]], where: str = "") -> None:
    """Refuse a tensor that the model does not have; `where` precedes its name."""
    for part in parts:
        for name in part:
            if name not in shapes:
                raise MergeError("a part holds a tensor that the model does not have", where=f"{where}{name}")


def pieces_of(
    name: str,
    parts: Sequence[Part],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    where: str = "",
) -> list[tuple[int, Tensor]]:
    """One tensor's rows in order, each with its first row; none for a tensor without values.

    `shape` is the whole tensor's, in the form in which the rows come (encoded rows: [R, bytes of a row]),
    and `dtype` their type (None: all alike). Raises MergeError; `where` precedes the name there.
    """
    where, shape = f"{where}{name}", tuple(shape)
    pieces = sorted((part[name] for part in parts if name in part), key=lambda piece: piece[0])
    pieces = [(start, rows) for start, rows in pieces if rows.numel()]
    if math.prod(shape) == 0:
        return []
    dtype = dtype or (pieces[0][1].dtype if pieces else torch.float32)
    if not shape:
        if len(pieces) != 1 or pieces[0][1].shape != ():
            raise MergeError("a scalar must come exactly once", where=where, saw=f"{len(pieces)} times")
        _check_rows(where, pieces[0][1], shape, dtype)
        return pieces
    covered = 0
    for start, rows in pieces:
        _check_rows(where, rows, shape, dtype)
        if start != covered:
            kind = "missing" if start > covered else "sent twice"
            first, last = sorted((start, covered))
            raise MergeError(f"rows {kind}", where=where, saw=f"rows {first} to {last} of {shape[0]}")
        covered = start + rows.shape[0]
    if covered != shape[0]:
        kind = "missing" if covered < shape[0] else "beyond the end"
        first, last = sorted((covered, shape[0]))
        raise MergeError(f"rows {kind}", where=where, saw=f"rows {first} to {last} of {shape[0]}")
    return pieces


def check_same(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Refuse whole fp32 tensors whose names or shapes are not the expected ones; `what` they are."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise MergeError(f"{what} has other tensors", saw=f"missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape or tensors[name].dtype != torch.float32:
            raise MergeError(
                f"{what} has another shape or type",
                where=name,
                saw=f"{list(tensors[name].shape)} {tensors[name].dtype}",
                fix=f"{list(tensor.shape)} {torch.float32}",
            )


def _check_rows(where: str, rows: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(rows.shape[1:]) != shape[1:] or rows.ndim != len(shape) or rows.dtype != dtype:
        raise MergeError(
            "rows of another shape or type",
            where=where,
            saw=f"{list(rows.shape)} {rows.dtype}",
            fix=f"rows of {list(shape)} {dtype}",
        )
