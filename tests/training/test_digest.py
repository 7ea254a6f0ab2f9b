"""Digests of parameters."""

from __future__ import annotations

import pytest
import torch

from elastic.training.digest import digest, finish_digest, partial_digest

pytestmark = pytest.mark.unit


def tensors() -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(3)
    return {
        "embedding": torch.randn(7, 5, generator=make),
        "norm": torch.randn(6, generator=make),
        "scale": torch.tensor(0.5),
    }


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_any_sharding_by_rows_gives_the_same_digest(cut: int) -> None:
    """Partial digests of the rows of two ranks add up to the digest of the whole."""
    whole = tensors()
    first = {
        "embedding": (0, whole["embedding"][:cut]),
        "norm": (0, whole["norm"][:cut]),
        "scale": (0, whole["scale"]),
    }
    second = {"embedding": (cut, whole["embedding"][cut:]), "norm": (cut, whole["norm"][cut:])}
    assert finish_digest(partial_digest(first) + partial_digest(second)) == digest(whole)


def test_one_changed_bit_changes_the_digest() -> None:
    """Flipping the lowest bit of any one element is seen."""
    before = digest(tensors())
    for name in ("embedding", "norm", "scale"):
        changed = tensors()
        changed[name].view(torch.int32).reshape(-1)[-1] ^= 1
        assert digest(changed) != before


def test_swapped_rows_names_and_signs_of_zero_are_seen() -> None:
    """The digest depends on the position, on the name and on the exact bits."""
    before = tensors()
    swapped = {**before, "embedding": before["embedding"].flip(0)}
    renamed = {("other" if name == "norm" else name): value for name, value in before.items()}
    assert len({digest(before), digest(swapped), digest(renamed)}) == 3
    assert digest({"x": torch.zeros(1)}) != digest({"x": -torch.zeros(1)})


def test_the_digest_is_the_same_on_every_machine() -> None:
    """A digest written down once stays valid."""
    assert digest({"x": torch.arange(4, dtype=torch.float32)}) == "6db1cbbc9ba203def60a82c1f809e80b"
