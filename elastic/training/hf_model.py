"""Hugging Face causal language models (extra `hf`), from a local folder or a `config.json`.

Nothing is fetched from a network and no code of the folder runs. The parameters keep their Hugging
Face names behind the prefix `hf.` (`hf.model.layers.0.self_attn.q_proj.weight`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic.base.config import HuggingFaceModel
from elastic.base.errors import ConfigError
from elastic.training.model import check_vocabulary, checked

PREFIX = "hf."


class HuggingFaceLM(nn.Module):
    """A causal LM of `transformers` as a plain map. `forward(tokens [B, T]) -> logits [B, T, V]`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hf = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> logits [B, T, V]."""
        return self.hf(input_ids=tokens, use_cache=False).logits


def load_hugging_face(cfg: HuggingFaceModel, *, vocab_size: int, seq_len: int) -> nn.Module:
    """Build the model of `cfg.path`, fresh from torch's current random state or from its weights.

    Raises ConfigError: extra not installed, path not found, not a causal LM, vocabulary or positions
    too few, weights missing or not matching.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            ["model.kind: hf needs the extra `hf`; pip install 'elastic-islands[hf]' on every node"]
        ) from error
    where = f"model.path: {cfg.path}"
    path = Path(cfg.path).expanduser()
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise ConfigError(
            [f"{where}: no config.json there; give a local folder (models are not fetched from the hub)"]
        )
    if cfg.weights and not path.is_dir():
        raise ConfigError([f"{where}: model.weights needs the folder that holds the weights, not a file"])
    try:
        config = transformers.AutoConfig.from_pretrained(
            config_file, local_files_only=True, trust_remote_code=False
        )
        _check_limits(config, where=where, vocab_size=vocab_size, seq_len=seq_len)
        model = _load(transformers, path, config, weights=cfg.weights, where=where)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError([f"{where}: transformers cannot build a causal LM from it: {error}"]) from error
    return checked(HuggingFaceLM(model), where=where, vocab_size=vocab_size, seq_len=seq_len)


def _load(transformers: Any, path: Path, config: Any, *, weights: bool, where: str) -> nn.Module:
    auto = transformers.AutoModelForCausalLM
    if not weights:
        return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model, info = auto.from_pretrained(
        path,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, info.get(problem) or ()))
        if names:
            raise ConfigError(
                [
                    f"{where}: weights and config.json do not fit: {len(names)} {problem.replace('_', ' ')}, "
                    f"first {names[0]}"
                ]
            )
    return model


def _check_limits(config: Any, *, where: str, vocab_size: int, seq_len: int) -> None:
    text = config.get_text_config()
    if hasattr(text, "vocab_size"):  # else it is no language model, and building it says so
        check_vocabulary(text.vocab_size, vocab_size, where=where)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions < seq_len:
        raise ConfigError(
            [f"{where}: the model has {positions} positions, data.seq_len is {seq_len}; shorten data.seq_len"]
        )
