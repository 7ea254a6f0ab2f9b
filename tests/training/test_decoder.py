"""Our decoder: exactly these parameters, causal, deterministic."""

from __future__ import annotations

import itertools

import pytest
import torch

from elastic.base.config import DecoderModel
from elastic.training.decoder import ffn_width
from elastic.training.model import build_model

pytestmark = pytest.mark.unit

VOCAB, SEQ_LEN = 31, 16


def _cfg(**changes: object) -> DecoderModel:
    return DecoderModel.model_validate(
        {"d_model": 24, "num_layers": 2, "num_heads": 4, "ffn_dim": 20, **changes}
    )


@pytest.mark.parametrize(
    ("kv", "tied", "qk_norm"), list(itertools.product([None, 2, 1], [True, False], [True, False]))
)
def test_it_has_exactly_these_parameters(kv: int | None, tied: bool, qk_norm: bool) -> None:
    """Names, shapes and order are those of the module's docstring: exports and records rely on them."""
    d, f, c = 24, 20, 6
    expected = {"embedding.weight": (VOCAB, d)}
    for layer in range(2):
        block = {
            "attention_norm": (d,),
            "attention.q": (d, d),
            "attention.k": ((kv or 4) * c, d),
            "attention.v": ((kv or 4) * c, d),
            "attention.o": (d, d),
            **({"attention.q_norm": (c,), "attention.k_norm": (c,)} if qk_norm else {}),
            "ffn_norm": (d,),
            "ffn.gate": (f, d),
            "ffn.up": (f, d),
            "ffn.down": (d, f),
        }
        expected |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    expected["final_norm.weight"] = (d,)
    if not tied:
        expected["head.weight"] = (VOCAB, d)
    model = build_model(_cfg(num_kv_heads=kv, tied_head=tied, qk_norm=qk_norm), VOCAB, SEQ_LEN, seed=0)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == list(expected.items())
    assert set(model.state_dict()) == set(expected)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_token_does_not_see_the_future() -> None:
    """Changing later tokens leaves the logits of earlier positions as they are."""
    model = build_model(_cfg(num_kv_heads=2, qk_norm=True), VOCAB, SEQ_LEN, seed=0)
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCAB
    first, second = model(tokens), model(changed)
    assert first.shape == (2, SEQ_LEN, VOCAB)
    torch.testing.assert_close(first[:, :9], second[:, :9])
    assert not torch.allclose(first[:, 9:], second[:, 9:])


def test_positions_matter_and_are_relative() -> None:
    """The same token twice in other contexts gives other logits; shorter sequences give a prefix."""
    model = build_model(_cfg(), VOCAB, SEQ_LEN, seed=0)
    tokens = torch.arange(SEQ_LEN)[None] % VOCAB
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]))
    swapped = tokens[:, [1, 0, *range(2, SEQ_LEN)]]
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])


def test_a_fresh_model_guesses_uniformly() -> None:
    """The first loss is near log V, so training does not start by unlearning."""
    model = build_model(DecoderModel(d_model=64, num_layers=4), 257, 32, seed=0)
    tokens = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(257.0).log().item(), abs=0.2)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    """More tokens than the model was built for raise with both numbers."""
    model = build_model(_cfg(), VOCAB, SEQ_LEN, seed=0)
    with pytest.raises(ValueError, match=r"17 tokens.* built for 16"):
        model(torch.zeros((1, SEQ_LEN + 1), dtype=torch.int64))


@pytest.mark.parametrize(("d_model", "width"), [(128, 352), (256, 688), (16, 48), (96, 256)])
def test_default_width(d_model: int, width: int) -> None:
    """Without `ffn_dim` the width is 8/3 of d_model, rounded up to a multiple of 16."""
    assert ffn_width(DecoderModel(d_model=d_model)) == width
