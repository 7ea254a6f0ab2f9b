"""The files that let `transformers` tokenise as the run did: tokenizer.json and tokenizer_config.json.

Bytes and tiktoken ranks are both byte-level BPE and are written in the format of the `tokenizers`
library without needing it; a `tokenizer.json` is copied. Ids are those of the run.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from elastic.base.config import BytesTokenizer, TiktokenTokenizer, TokenizersTokenizer
from elastic.base.errors import DataError

END_OF_BYTES = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


def write_tokenizer(
    tokenizer: BytesTokenizer | TokenizersTokenizer | TiktokenTokenizer, folder: Path, seq_len: int
) -> int | None:
    """Write both files; returns the id of the end of document, None if the tokenizer has it under no id.

    Raises DataError if the tokenizer's own file is gone from this machine.
    """
    if isinstance(tokenizer, BytesTokenizer):
        end, content = END_OF_BYTES, byte_level_json({bytes([i]): i for i in range(256)}, None, END_OF_BYTES)
    elif isinstance(tokenizer, TiktokenTokenizer):
        end = tokenizer.end_of_document
        content = byte_level_json(_ranks(_read(tokenizer.file)), tokenizer.pattern, end)
    else:
        end, content = tokenizer.end_of_document, json.loads(_read(tokenizer.file))
    (folder / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text that spells out the end of a document is text, as in training
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1))
    return _id_of(content, end)


def byte_level_json(ranks: dict[bytes, int], pattern: str | None, end: str) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE: tokens and their ranks, the pattern that splits text first.

    A rank is both a token's id and the priority of making it. `end` gets the first free id. BPE in
    `tokenizers` wants pairs, so each way to make a token of two others is a merge, best rank first.
    """
    letters = _letters()
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    free = max(ranks.values()) + 1

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": free,
                "content": end,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}
        if pattern
        else byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # tiktoken takes a whole piece that is a token as it is
            "vocab": {shown(token): rank for token, rank in ranks.items()} | {end: free},
            "merges": [[shown(left), shown(right)] for *_, left, right in sorted(merges)],
        },
    }


def _letters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _ranks(content: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in content.splitlines() if line.strip())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _id_of(content: dict[str, Any], token: str) -> int | None:
    for added in content.get("added_tokens") or []:
        if added.get("content") == token:
            return int(added["id"])
    vocabulary = content.get("model", {}).get("vocab")
    found = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    return None if found is None else int(found)


def _read(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise DataError(
            "the tokenizer's file is not on this machine",
            where="data.tokenizer.file",
            saw=f"{file}: {error.strerror}",
            fix="export on a machine that has it, or put it there",
        ) from error
