"""build_model: deterministic for every kind, and clear about what is wrong."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from elastic.base.config import DecoderModel, Model, PythonModel
from elastic.base.errors import ConfigError, UserCodeError
from elastic.training.digest import digest
from elastic.training.model import blocks_of, build_model

pytestmark = pytest.mark.unit

SOURCE = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocab)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

def tiny(*, vocab_size, seq_len, width=4):
    return Tiny(vocab_size, width)

def half(*, vocab_size, seq_len):
    return Tiny(vocab_size, 4).bfloat16()

def raises(*, vocab_size, seq_len):
    raise ValueError("my own mistake")

def not_a_module(*, vocab_size, seq_len):
    return Tiny

def small_vocabulary(*, vocab_size, seq_len):
    return Tiny(vocab_size - 1, 4)

def pooled(*, vocab_size, seq_len):
    class Pooled(Tiny):
        def forward(self, tokens):
            return super().forward(tokens).mean(1)
    return Pooled(vocab_size, 4)

def broken_forward(*, vocab_size, seq_len):
    class Broken(Tiny):
        def forward(self, tokens):
            return self.embeding(tokens)
    return Broken(vocab_size, 4)

def frozen(*, vocab_size, seq_len):
    return Tiny(vocab_size, 4).requires_grad_(False)

def meta(*, vocab_size, seq_len):
    with torch.device("meta"):
        return Tiny(vocab_size, 4)

number = 3
"""


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A module `my_models_for_tests` beside the job; returns the `model` section of one of its functions."""
    (tmp_path / "my_models_for_tests.py").write_text(SOURCE)
    (tmp_path / "my_broken_module.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, **arguments: PythonModel(
        kind="python", entry=f"my_models_for_tests:{name}", arguments=arguments
    )


def _bits(cfg: Model, seed: int) -> str:
    return digest(dict(build_model(cfg, 11, 6, seed).named_parameters()))


def test_the_seed_alone_decides(entry) -> None:  # type: ignore[no-untyped-def]
    """Same seed, same bits, whatever the process's random state and threads; another seed differs."""
    threads = torch.get_num_threads()
    for cfg in (DecoderModel(d_model=64, num_layers=2), entry("tiny", width=64)):
        torch.manual_seed(1)
        torch.set_num_threads(1)
        first = _bits(cfg, 3)
        torch.manual_seed(2)
        torch.set_num_threads(4)
        assert _bits(cfg, 3) == first
        assert _bits(cfg, 4) != first
    torch.set_num_threads(threads)


def test_the_process_keeps_its_random_state(entry) -> None:  # type: ignore[no-untyped-def]
    """Building draws from no global generator: torch's, numpy's and Python's states are as before."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for cfg in (DecoderModel(d_model=64, num_layers=2), entry("tiny")):
        build_model(cfg, 11, 6, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_an_entry_gets_its_arguments_and_becomes_fp32(entry) -> None:  # type: ignore[no-untyped-def]
    """The function's model is returned, with the job's arguments, in fp32 on the CPU."""
    model = build_model(entry("tiny", width=9), 11, 6, 0)
    assert model.embedding.weight.shape == (11, 9)
    assert model.training
    assert all(p.dtype == torch.float32 for p in build_model(entry("half"), 11, 6, 0).parameters())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("no_such_module_here:f", "no module named 'no_such_module_here'; put it beside the job"),
        ("my_models_for_tests.inner:f", "no module named 'my_models_for_tests.inner'"),
        ("my_models_for_tests:absent", "has no function 'absent'"),
        ("my_models_for_tests:number", "has no function 'number'"),
        ("my_models_for_tests:small_vocabulary", "knows 10 tokens, the tokenizer 11"),
    ],
)
def test_an_entry_that_cannot_be_used_is_a_config_error(entry, section: str, message: str) -> None:  # type: ignore[no-untyped-def]
    """A wrong module, function or vocabulary ends with exit code 2 and the way to mend it."""
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(PythonModel(kind="python", entry=section), 11, 6, 0)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("my_models_for_tests:raises", "your function raised ValueError: my own mistake"),
        ("my_models_for_tests:tiny", "unexpected keyword argument 'wdith'"),
        ("my_broken_module:f", "importing your module raised ModuleNotFoundError"),
        ("my_models_for_tests:not_a_module", r"must return a torch.nn.Module \(saw: type\)"),
        ("my_models_for_tests:pooled", r"\[1, 11\] for B, T = \(1, 6\)"),
        ("my_models_for_tests:broken_forward", "has no attribute 'embeding'"),
        ("my_models_for_tests:frozen", "no parameter to train"),
        ("my_models_for_tests:meta", "meta device"),
    ],
)
def test_mistakes_in_the_users_code_are_named(entry, section: str, message: str) -> None:  # type: ignore[no-untyped-def]
    """What the user's code does wrong is a UserCodeError that names the entry and what was seen."""
    arguments = {"wdith": 3} if section.endswith(":tiny") else {}
    with pytest.raises(UserCodeError, match=message) as caught:
        build_model(PythonModel(kind="python", entry=section, arguments=arguments), 11, 6, 0)
    assert section in str(caught.value)


def test_the_users_traceback_survives_another_process(entry) -> None:  # type: ignore[no-untyped-def]
    """The file and line of the user's exception are in the text, also after pickling."""
    with pytest.raises(UserCodeError) as caught:
        build_model(entry("raises"), 11, 6, 0)
    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert "my_models_for_tests.py" in text
    assert 'raise ValueError("my own mistake")' in text


# ------------------------------------------------------------------------------------- blocks


def test_blocks_of_our_decoder() -> None:
    """The decoder's blocks are sharded one by one."""
    model = build_model(DecoderModel(d_model=16, num_layers=3), 11, 6, 0)
    assert blocks_of(model) == list(model.blocks)


def test_blocks_are_found_or_offered(entry) -> None:  # type: ignore[no-untyped-def]
    """Without `blocks` the largest outermost ModuleList is taken; with it, what the model says."""
    model = build_model(entry("tiny"), 11, 6, 0)
    assert blocks_of(model) == list(model.layers)
    model.blocks = [model.layers[1]]
    assert blocks_of(model) == [model.layers[1]]
    model.blocks = lambda: [model.layers[0], model.layers[2]]
    assert blocks_of(model) == [model.layers[0], model.layers[2]]


def test_only_outermost_lists_count() -> None:
    """Experts inside a layer are sharded with their layer; a smaller list elsewhere with the root."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(2, 2)])
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(Layer() for _ in range(2))
    assert blocks_of(model) == list(model.body.layers)


def test_shared_parameters_stay_with_the_root() -> None:
    """A block that shares a parameter with another part of the model is not sharded apart."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.head = nn.Linear(4, 4)
    model.head.weight = model.layers[1].weight
    assert blocks_of(model) == [model.layers[0], model.layers[2]]
    repeated = nn.Module()
    repeated.layers = nn.ModuleList([model.layers[0]] * 3)
    assert blocks_of(repeated) == [model.layers[0]]


def test_a_model_without_lists_has_no_blocks() -> None:
    """Nothing to shard one by one: the root takes all."""
    assert blocks_of(nn.Linear(2, 2)) == []
