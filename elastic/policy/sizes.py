"""How large a model is and what it costs, counted from its configuration alone.

The counts are exact for the decoder of `elastic.training.decoder`, parameter by parameter. For other
models nothing is known before they are built; `encoded_bytes` then takes their shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.base.config import DecoderModel
    from elastic.base.outer_config import Codec

Shape = tuple[int, ...]

BLOCK = 128
"""Values of a row that share a scale under int8, int4 and e3m0: as in `elastic.training.block_codec`."""
_BITS: dict[Codec, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "e3m0": 4}
_BLOCK_CODECS: tuple[Codec, ...] = ("int8", "int4", "e3m0")
_SCALE_BYTES = 2


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
    matrices: tuple[Shape, ...]
    """All others as (rows, columns): the matrices of as many columns stacked, narrow ones first."""


def kv_heads(model: DecoderModel) -> int:
    """Key and value heads: as given, else as many as query heads."""
    return model.num_kv_heads or model.num_heads


def ffn_width(model: DecoderModel) -> int:
    """Width of the SwiGLU layer: as given, else 8/3 of `d_model` rounded up to a multiple of 16."""
    return model.ffn_dim or -(-8 * model.d_model // 48) * 16


def decoder_shapes(model: DecoderModel, vocab_size: int) -> dict[str, Shape]:
    """Names and shapes of the decoder's parameters in order of definition, a tied head left out."""
    block = _block_shapes(model)
    shapes: dict[str, Shape] = {"embedding.weight": (vocab_size, model.d_model)}
    for layer in range(model.num_layers):
        shapes |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["final_norm.weight"] = (model.d_model,)
    if not model.tied_head:
        shapes["head.weight"] = (vocab_size, model.d_model)
    return shapes


def count_parameters(model: DecoderModel, vocab_size: int) -> ParameterCount:
    """Count the decoder's parameters for a vocabulary of `vocab_size` tokens."""
    shapes = decoder_shapes(model, vocab_size)
    per_block = _numel(_block_shapes(model).values())
    embedding = vocab_size * model.d_model
    rows: Counter[int] = Counter()
    for shape in shapes.values():
        if len(shape) == 2:
            rows[shape[1]] += shape[0]
    return ParameterCount(
        total=_numel(shapes.values()),
        embedding=embedding,
        head=0 if model.tied_head else embedding,
        per_block=per_block,
        blocks=model.num_layers * per_block,
        vectors=_numel(shape for shape in shapes.values() if len(shape) == 1),
        matrices=tuple((rows[columns], columns) for columns in sorted(rows)),
    )


def flops_per_token(model: DecoderModel, vocab_size: int, seq_len: int) -> int:
    """Floating-point operations to train on one token, forward and backward.

    `6 N + 12 L D T` as in PaLM (arXiv 2204.02311, appendix B): N are the parameters that multiply
    activations (matrices of the blocks and the head, tied or not; a look-up in the embedding is
    free), the second term is attention over all T positions, not halved for the causal mask.
    """
    in_a_block = _numel(shape for shape in _block_shapes(model).values() if len(shape) == 2)
    multiplied = model.num_layers * in_a_block + vocab_size * model.d_model
    return 6 * multiplied + 12 * model.num_layers * model.d_model * seq_len


def encoded_bytes(codec: Codec, shape: Shape) -> int:
    """Bytes in which a tensor travels, exactly those of `elastic.training.codec`.

    fp32 for tensors of one dimension or none. The block codecs see any other as [rows, all the rest]
    and add two bytes, a scale, for each started block of a row; two 4-bit values share a byte.
    """
    if len(shape) < 2:
        return 4 * math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    row = -(-columns * _BITS[codec] // 8)
    if codec in _BLOCK_CODECS:
        row += _SCALE_BYTES * -(-columns // BLOCK)
    return rows * row


def bytes_per_outer_step(parameters: ParameterCount, codec: Codec) -> int:
    """Bytes of all values of one island's delta, or of one new version, in one direction."""
    matrices = sum(encoded_bytes(codec, shape) for shape in parameters.matrices)
    return matrices + encoded_bytes(codec, (parameters.vectors,))


def _block_shapes(model: DecoderModel) -> dict[str, Shape]:
    """The parameters of one block, in order of definition."""
    width, ffn = model.d_model, ffn_width(model)
    head_dim = width // model.num_heads
    kv_width = head_dim * kv_heads(model)
    shapes: dict[str, Shape] = {
        "attention_norm": (width,),
        "attention.q": (width, width),
        "attention.k": (kv_width, width),
        "attention.v": (kv_width, width),
        "attention.o": (width, width),
    }
    if model.qk_norm:
        shapes |= {"attention.q_norm": (head_dim,), "attention.k_norm": (head_dim,)}
    return shapes | {
        "ffn_norm": (width,),
        "ffn.gate": (ffn, width),
        "ffn.up": (ffn, width),
        "ffn.down": (width, ffn),
    }


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)
