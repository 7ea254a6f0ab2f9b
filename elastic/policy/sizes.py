"""How large a model is and what it costs, counted from its configuration alone.

The counts are exact for the decoder of `elastic.training.decoder`, parameter by parameter. For other
models nothing is known before they are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from elastic.base.config import DecoderModel

Codec = Literal["fp32", "bf16"]

BYTES_PER_VALUE: dict[Codec, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Trainable parameters of a decoder; tied weights count once."""

    total: int
    embedding: int
    head: int
    """0 if the head is tied to the embedding."""
    per_block: int
    blocks: int
    """All blocks together."""
    vectors: int
    """Those of `total` in 1-D tensors (the norms), which always travel in fp32."""


def kv_heads(model: DecoderModel) -> int:
    """Key and value heads: as given, else as many as query heads."""
    return model.num_kv_heads or model.num_heads


def ffn_width(model: DecoderModel) -> int:
    """Width of the SwiGLU layer: as given, else 8/3 of `d_model` rounded up to a multiple of 16."""
    return model.ffn_dim or -(-8 * model.d_model // 48) * 16


def count_parameters(model: DecoderModel, vocab_size: int) -> ParameterCount:
    """Count the decoder's parameters for a vocabulary of `vocab_size` tokens."""
    width, head_dim = model.d_model, model.d_model // model.num_heads
    norms = 2 * width + (2 * head_dim if model.qk_norm else 0)
    per_block = _block_matrices(model) + norms
    blocks = model.num_layers * per_block
    embedding = vocab_size * width
    head = 0 if model.tied_head else embedding
    return ParameterCount(
        total=embedding + blocks + width + head,  # width: the final norm
        embedding=embedding,
        head=head,
        per_block=per_block,
        blocks=blocks,
        vectors=model.num_layers * norms + width,
    )


def flops_per_token(model: DecoderModel, vocab_size: int, seq_len: int) -> int:
    """Floating-point operations to train on one token, forward and backward.

    `6 N + 12 L D T` as in PaLM (arXiv 2204.02311, appendix B): N are the parameters that multiply
    activations (matrices of the blocks and the head, tied or not; a look-up in the embedding is
    free), the second term is attention over all T positions, not halved for the causal mask.
    """
    multiplied = model.num_layers * _block_matrices(model) + vocab_size * model.d_model
    return 6 * multiplied + 12 * model.num_layers * model.d_model * seq_len


def bytes_per_outer_step(parameters: ParameterCount, codec: Codec) -> int:
    """Bytes of all values of one island's delta, or of one new version, in one direction."""
    matrices = parameters.total - parameters.vectors
    return matrices * BYTES_PER_VALUE[codec] + parameters.vectors * BYTES_PER_VALUE["fp32"]


def _block_matrices(model: DecoderModel) -> int:
    """Parameters in the matrices of one block: q, k, v, o and the three of SwiGLU."""
    width = model.d_model
    kv_width = width // model.num_heads * kv_heads(model)
    return 2 * width * width + 2 * width * kv_width + 3 * width * ffn_width(model)
