"""From a job's `model` section to an `nn.Module`, for all three kinds: `decoder`, `hf`, `python`.

Every model maps tokens [B, T] to logits [B, T, V], is built on the CPU in fp32, and depends on the
seed alone: not on the process's random state (which it leaves as it was), nor on the threads.
`blocks_of` finds the repeated blocks that are sharded one by one.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from elastic.base.config import DecoderModel, HuggingFaceModel, Model, PythonModel
from elastic.base.errors import ConfigError, ElasticError, UserCodeError
from elastic.training.decoder import Decoder

_CHECKED_TOKENS = 8  # positions of the dry run that checks the shape of the logits
# torch reads the state under a mutex of its own and may collect garbage meanwhile, which lets another
# thread in; if that one then waits for the mutex with the interpreter's lock in hand, both stand still.
_RANDOM_STATE = threading.RLock()


def build_model(model_cfg: Model, vocab_size: int, seq_len: int, seed: int) -> nn.Module:
    """Build the model of a job: on the CPU, fp32, the same bits for the same seed.

    `vocab_size` is the tokenizer's; the model's own may be larger. Raises ConfigError if the section
    cannot be met (extra not installed, folder or entry not found, vocabulary too small), and
    UserCodeError if the user's own function or forward raises.
    """
    with seeded(seed):
        if isinstance(model_cfg, DecoderModel):
            model = Decoder(model_cfg, vocab_size=vocab_size, seq_len=seq_len)
            model.initialise(torch.Generator().manual_seed(seed))
            return model
        if isinstance(model_cfg, HuggingFaceModel):
            from elastic.training.hf_model import load_hugging_face  # needs the extra

            return load_hugging_face(model_cfg, vocab_size=vocab_size, seq_len=seq_len)
        return _call_entry(model_cfg, vocab_size=vocab_size, seq_len=seq_len)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules to shard one by one, in order of definition; [] if there are none.

    They are what the model itself offers as `blocks` (a sequence, or a method that returns one),
    else the members of the outermost `nn.ModuleList` that holds most parameters. A module that
    shares a parameter with the rest of the model is left to the root.
    """
    offered: Any = getattr(model, "blocks", None)
    if callable(offered) and not isinstance(offered, nn.Module):
        offered = offered()
    if offered is None:
        offered = max(_outermost_lists(model), key=_num_parameters, default=[])
    blocks = list(dict.fromkeys(offered))  # one module may stand twice in a list
    return [block for block in blocks if _stands_alone(block, model)]


@contextmanager
def seeded(seed: int) -> Generator[None, None, None]:
    """Run a block under torch's CPU random state of `seed`, and put the old state back."""
    with _RANDOM_STATE:
        before = torch.get_rng_state()
        torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        with _RANDOM_STATE:
            torch.set_rng_state(before)


# ----------------------------------------------------------------------------- a Python entry


def _call_entry(cfg: PythonModel, *, vocab_size: int, seq_len: int) -> nn.Module:
    where = f"model.entry: {cfg.entry}"
    function = _import_entry(cfg.entry)
    try:
        model = function(vocab_size=vocab_size, seq_len=seq_len, **cfg.arguments)
    except ElasticError:
        raise
    except Exception as error:
        raise user_error(where, "your function raised", error) from error
    if not isinstance(model, nn.Module):
        raise UserCodeError(
            "your function must return a torch.nn.Module",
            where=where,
            saw=type(model).__name__,
            fix="return the model itself, not a class, a tuple or a dictionary",
        )
    return checked(model, where=where, vocab_size=vocab_size, seq_len=seq_len)


def _import_entry(entry: str) -> Callable[..., Any]:
    module_name, _, function_name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise user_error(f"model.entry: {entry}", "importing your module raised", error) from error
        raise ConfigError(
            [
                f"model.entry: no module named {error.name!r}; put it beside the job where the run is "
                "started (under `ray job submit`: into --working-dir) or install it on every node"
            ]
        ) from error
    except Exception as error:
        raise user_error(f"model.entry: {entry}", "importing your module raised", error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            [f"model.entry: module {module_name!r} has no function {function_name!r}; name one it defines"]
        )
    return function


def user_error(where: str, what: str, error: BaseException) -> UserCodeError:
    """Wrap an exception of the user's code; its traceback ends the text, across processes too."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    return UserCodeError(f"{what} {type(error).__name__}: {error}\n{lines}", where=where)


# ------------------------------------------------------------------------------------- checks


def checked(model: nn.Module, *, where: str, vocab_size: int, seq_len: int) -> nn.Module:
    """Bring a foreign model to the CPU in fp32 and check it with one short forward pass."""
    meta = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if meta:
        raise UserCodeError(
            "a parameter has no values",
            where=where,
            saw=f"{meta[0]} on the meta device",
            fix="build the model on the CPU",
        )
    model = model.to(device="cpu").float()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserCodeError("the model has no parameter to train", where=where, fix="leave some unfrozen")
    tokens = torch.zeros((1, min(seq_len, _CHECKED_TOKENS)), dtype=torch.int64)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(tokens)
    except Exception as error:
        raise user_error(where, f"forward on tokens {list(tokens.shape)} raised", error) from error
    finally:
        model.train(was_training)
    expected = (1, tokens.shape[1])
    if not isinstance(logits, Tensor) or logits.ndim != 3 or tuple(logits.shape[:2]) != expected:
        saw = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserCodeError(
            "forward(tokens [B, T]) must return logits [B, T, V]",
            where=where,
            saw=f"{saw} for B, T = {expected}",
            fix="return the logits as one tensor",
        )
    check_vocabulary(logits.shape[-1], vocab_size, where=where)
    return model


def check_vocabulary(model_size: int, tokenizer_size: int, *, where: str) -> None:
    """Refuse a model that has no logit for some token of the tokenizer."""
    if model_size < tokenizer_size:
        raise ConfigError(
            [
                f"{where}: the model knows {model_size} tokens, the tokenizer {tokenizer_size}; "
                "give the model a vocabulary at least as large, or choose its own tokenizer in data.tokenizer"
            ]
        )


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _num_parameters(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _stands_alone(block: nn.Module, model: nn.Module) -> bool:
    """True if `block` is called as one and no parameter of it is also used elsewhere in the model."""
    own = {id(parameter) for parameter in block.parameters()}
    if not own or isinstance(block, nn.ModuleList | nn.ModuleDict):
        return False
    inside = set(block.modules())
    return not any(
        id(parameter) in own
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    )
