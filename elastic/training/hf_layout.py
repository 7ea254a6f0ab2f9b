"""Our decoder's parameters in Hugging Face's layout, and back: pure renaming, no arithmetic.

Without `qk_norm` the decoder is a `LlamaForCausalLM`, with it a `Qwen3ForCausalLM`; rotary pairs,
grouped heads and matrices are laid out alike, so the logits are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from elastic.base.config import DecoderModel
from elastic.base.errors import ElasticError
from elastic.training.decoder import ffn_width, kv_heads

_WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_FROM_WHOLE = {theirs: ours for ours, theirs in _WHOLE.items()}
_FROM_BLOCK = {theirs: ours for ours, theirs in _IN_BLOCK.items()}


def to_hugging_face(
    state: Mapping[str, Tensor], cfg: DecoderModel, vocab_size: int, seq_len: int
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The contents of `config.json` and the renamed tensors (not copied) of a decoder's parameters."""
    names = _names(cfg)
    _check_names(state, names, "parameters")
    return _config(cfg, vocab_size, seq_len), {theirs: state[ours] for ours, theirs in names.items()}


def from_hugging_face(state: Mapping[str, Tensor], cfg: DecoderModel) -> dict[str, Tensor]:
    """The decoder's parameters from a Llama or Qwen3 state (not copied), in order of definition.

    The copy of a tied head (`lm_head.weight`) is left out. Raises ElasticError if names are missing or
    unknown: the state is then of another model than `cfg` says.
    """
    names = _names(cfg)
    given = {name: t for name, t in state.items() if not (cfg.tied_head and name == "lm_head.weight")}
    _check_names(given, {theirs: ours for ours, theirs in names.items()}, "Hugging Face parameters")
    return {ours: given[theirs] for ours, theirs in names.items()}


def our_name(name: str) -> str | None:
    """Our name of a Llama or Qwen3 parameter, or None if the decoder has no such parameter."""
    if name in _FROM_WHOLE:
        return _FROM_WHOLE[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.weight", name)
    if match is None or match[2] not in _FROM_BLOCK:
        return None
    return f"blocks.{match[1]}.{_FROM_BLOCK[match[2]]}.weight"


def _names(cfg: DecoderModel) -> dict[str, str]:
    """Every parameter of the decoder, our name to theirs, in our order of definition."""
    inside = [name for name in _IN_BLOCK if cfg.qk_norm or not name.endswith(("q_norm", "k_norm"))]
    names = {"embedding.weight": _WHOLE["embedding.weight"]}
    for layer in range(cfg.num_layers):
        for name in inside:
            names[f"blocks.{layer}.{name}.weight"] = f"model.layers.{layer}.{_IN_BLOCK[name]}.weight"
    names["final_norm.weight"] = _WHOLE["final_norm.weight"]
    if not cfg.tied_head:
        names["head.weight"] = _WHOLE["head.weight"]
    return names


def _config(cfg: DecoderModel, vocab_size: int, seq_len: int) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM" if cfg.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if cfg.qk_norm else "llama",
        "vocab_size": vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": ffn_width(cfg),
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": kv_heads(cfg),
        "head_dim": cfg.d_model // cfg.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},  # transformers 5
        "tie_word_embeddings": cfg.tied_head,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if cfg.qk_norm:
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": cfg.num_layers}
    else:
        config |= {"mlp_bias": False, "pretraining_tp": 1}
    return config


def _check_names(given: Mapping[str, object], expected: Mapping[str, object], what: str) -> None:
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or unknown:
        raise ElasticError(
            f"{what} are not those of the configured decoder",
            saw=f"missing {missing[:3]}, unknown {unknown[:3]}",
            fix="use the `model` section with which they were trained",
        )
