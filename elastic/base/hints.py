"""What a misspelt or misplaced key was probably meant to be. Hints only: nothing here is ever accepted."""

from __future__ import annotations

import difflib

from pydantic import BaseModel

from elastic.base.schema import keys_of

ELSEWHERE_CALLED: dict[str, str] = {
    "learning_rate": "lr",
    "max_lr": "lr",
    "min_lr": "final_lr_share",
    "warmup_steps": "warmup_share",
    "batch_size": "batch_sequences",
    "global_batch_size": "batch_sequences",
    "micro_batch_size": "micro_batch_sequences",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "dtype": "compute_dtype",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "dim": "d_model",
    "n_layer": "num_layers",
    "n_layers": "num_layers",
    "num_hidden_layers": "num_layers",
    "n_head": "num_heads",
    "n_heads": "num_heads",
    "num_attention_heads": "num_heads",
    "n_kv_heads": "num_kv_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_dim",
    "tie_word_embeddings": "tied_head",
    "block_size": "seq_len",
    "context_length": "seq_len",
    "sequence_length": "seq_len",
    "max_steps": "tokens",
    "max_tokens": "tokens",
    "num_epochs": "epochs",
    "inner_steps": "sync_every",
    "num_workers": "workers",
    "output_dir": "run_folder",
    "random_seed": "seed",
}
"""Names that other trainers use, and ours for the same thing."""


def did_you_mean(key: str, here: type[BaseModel] | None, root: type[BaseModel]) -> str:
    """A hint for an unknown key: its name here, its right section, the nearest name, or all names.

    Looks like `did you mean 'lr'?`, `did you mean inner.lr or outer.lr?` or `valid here: a, b, c`.
    """
    valid = list(here.model_fields) if here else []
    everywhere = list(dict.fromkeys(keys_of(root)))
    last = {full: full.rsplit(".", 1)[-1] for full in everywhere}
    meant = ELSEWHERE_CALLED.get(_normal(key), _normal(key))
    if meant in valid:
        return f"did you mean '{meant}'?"
    if meant in last.values():
        return f"did you mean {' or '.join(full for full in everywhere if last[full] == meant)}?"
    near = nearest(key, valid)
    if near:
        return f"did you mean '{near}'?"
    near = nearest(key, list(last.values()))
    if near:
        return f"did you mean {' or '.join(full for full in everywhere if last[full] == near)}?"
    return f"valid here: {', '.join(valid)}" if valid else ""


def nearest(word: str, valid: list[str]) -> str | None:
    """The valid word closest to `word`, also by the names other trainers use; None if none is close."""
    words = {_normal(name): name for name in valid}
    for foreign, ours in ELSEWHERE_CALLED.items():
        if ours in valid:
            words.setdefault(foreign, ours)
    close = difflib.get_close_matches(_normal(word), words, n=1, cutoff=0.7)
    return words[close[0]] if close else None


def _normal(word: str) -> str:
    return word.strip().lower().replace("-", "_").replace(" ", "_")
