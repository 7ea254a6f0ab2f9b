"""Our own decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes in the comments: B sequences, T positions, D `d_model`, N query heads, K key and value heads,
C channels of a head (D / N), F `ffn_dim`, V tokens of the vocabulary, L blocks. The parameters, in
order of definition and with their names (no others exist, and none has a bias):

    embedding.weight                                 [V, D]
    blocks.<l>.attention_norm.weight                 [D]
    blocks.<l>.attention.{q,k,v,o}.weight            [D, D], [K*C, D], [K*C, D], [D, D]
    blocks.<l>.attention.{q_norm,k_norm}.weight      [C]            only with `qk_norm`
    blocks.<l>.ffn_norm.weight                       [D]
    blocks.<l>.ffn.{gate,up,down}.weight             [F, D], [F, D], [D, F]
    final_norm.weight                                [D]
    head.weight                                      [V, D]         only without `tied_head`

The arithmetic is that of Llama, or of Qwen3 with `qk_norm`; `elastic.training.hf_layout` renames.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.base.config import DecoderModel

INIT_STD = 0.02


def kv_heads(cfg: DecoderModel) -> int:
    """Key and value heads: as given, else as many as query heads."""
    return cfg.num_kv_heads or cfg.num_heads


def ffn_width(cfg: DecoderModel) -> int:
    """Width of the SwiGLU layer: as given, else 8/3 of `d_model` rounded up to a multiple of 16."""
    return cfg.ffn_dim or -(-(8 * cfg.d_model) // 48) * 16


class Rotary(nn.Module):
    """Rotary positions (arXiv 2104.09864); channel c is paired with c + C/2, as in Hugging Face."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)  # [T, C/2]
        cos = torch.cat((angles.cos(), angles.cos()), dim=-1)[:, None, :]  # [T, 1, C]
        sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)[:, None, :]
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate heads x [B, T, N, C] by their positions, in fp32; returns x's type."""
        length, half = x.shape[1], x.shape[-1] // 2
        if length > self.cos.shape[0]:
            raise ValueError(f"sequence of {length} tokens; the model was built for {self.cos.shape[0]}")
        swapped = x.roll(half, dims=-1)  # the two halves of a head change places
        return (x * self.cos[:length] + swapped * self.sin[:length]).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; each of K key and value heads serves N / K query heads."""

    def __init__(self, cfg: DecoderModel) -> None:
        super().__init__()
        self.head_dim = cfg.d_model // cfg.num_heads
        kv_width = kv_heads(cfg) * self.head_dim
        self.grouped = kv_heads(cfg) != cfg.num_heads
        self.q = nn.Linear(cfg.d_model, cfg.d_model, bias=False)
        self.k = nn.Linear(cfg.d_model, kv_width, bias=False)
        self.v = nn.Linear(cfg.d_model, kv_width, bias=False)
        self.o = nn.Linear(cfg.d_model, cfg.d_model, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, cfg.norm_eps) if cfg.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # [B, T, N, C]
        k = self.k(x).unflatten(-1, (-1, self.head_dim))  # [B, T, K, C]
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = F.scaled_dot_product_attention(
            rotary(q).transpose(1, 2),
            rotary(k).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )  # [B, N, T, C]
        return self.o(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: DecoderModel) -> None:
        super().__init__()
        self.gate = nn.Linear(cfg.d_model, ffn_width(cfg), bias=False)
        self.up = nn.Linear(cfg.d_model, ffn_width(cfg), bias=False)
        self.down = nn.Linear(ffn_width(cfg), cfg.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream after its own norm."""

    def __init__(self, cfg: DecoderModel) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(cfg.d_model, cfg.norm_eps)
        self.attention = Attention(cfg)
        self.ffn_norm = nn.RMSNorm(cfg.d_model, cfg.norm_eps)
        self.ffn = FeedForward(cfg)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [B, T, D] -> [B, T, D]. The table comes as a module: FSDP would cast a tensor to bf16."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """The decoder. `forward(tokens [B, T]) -> logits [B, T, V]`, T at most `seq_len`."""

    def __init__(self, cfg: DecoderModel, *, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
        self.final_norm = nn.RMSNorm(cfg.d_model, cfg.norm_eps)
        self.head = None if cfg.tied_head else nn.Linear(cfg.d_model, vocab_size, bias=False)
        self.rotary = Rotary(seq_len, cfg.d_model // cfg.num_heads, cfg.rope_theta)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw all matrices, in order of definition, from N(0, 0.02); norms become 1.

        The projections back into the residual stream are scaled by 1 / sqrt(2 L), so that its
        variance does not grow with depth (GPT-2).
        """
        residual_std = INIT_STD / (2 * len(self.blocks)) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                into_residual = name.endswith((".o.weight", ".down.weight"))
                parameter.normal_(0.0, residual_std if into_residual else INIT_STD, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> logits [B, T, V] of the next token at each position."""
        x = self.embedding(tokens)  # [B, T, D]
        for block in self.blocks:
            x = block(x, self.rotary)
        x = self.final_norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
