from __future__ import annotations

import base64
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.base.config import BytesTokenizer, TiktokenTokenizer, TokenizersTokenizer
from elastic.base.errors import DataError
from elastic.training.tokenizer import load_tokenizer, token_dtype

pytestmark = pytest.mark.unit

TEXTS = ["def f(x):\n    return x + 1\n", "Grüße, 世界 🙂", "end <|endoftext|> of text"]
PATTERN = r"\p{L}+|\p{N}+|[^\p{L}\p{N}\s]+|\s+"


@pytest.fixture
def hf_config(tmp_path):
    """A small trained tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.enable_truncation(4)  # as some published files have it
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TokenizersTokenizer(kind="tokenizers", file=str(tmp_path / "tokenizer.json"))


@pytest.fixture
def tiktoken_config(tmp_path):
    """A rank file of all bytes and two merges."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([value]) for value in range(256)] + [b"re", b"ret"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "small.tiktoken").write_text("\n".join(lines) + "\n")
    return TiktokenTokenizer(kind="tiktoken", file=str(tmp_path / "small.tiktoken"), pattern=PATTERN)


@given(text=st.text())
def test_bytes_round_trip(text):
    """Any text comes back from its bytes, and its ids are its UTF-8 bytes."""
    tokenizer = load_tokenizer(BytesTokenizer())
    (ids,) = tokenizer.encode_batch([text])
    assert ids.dtype == token_dtype(tokenizer.vocab_size) == np.uint16
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text


def test_broken_bytes_decode():
    """Ids cut inside a character decode with a replacement mark, as samples of a model need it."""
    assert load_tokenizer(BytesTokenizer()).decode(list("é".encode()[:1])) == "\ufffd"


@pytest.mark.parametrize("kind", ["hf_config", "tiktoken_config"])
def test_file_tokenizers(kind, request):
    """Texts come back, ids fit the vocabulary, and a spelt-out special token stays text."""
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    encoded = tokenizer.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, encoded, strict=True):
        assert ids.dtype == token_dtype(tokenizer.vocab_size)
        assert ids.max() < tokenizer.vocab_size
        assert tokenizer.end_of_document not in ids
        assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text
    assert len(encoded[0]) < len(TEXTS[0].encode())  # merges are used, nothing is truncated


def test_the_end_of_document_gets_the_first_free_id(tiktoken_config):
    """In a rank file the special token follows the last rank."""
    tokenizer = load_tokenizer(tiktoken_config)
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (258, 259)


def test_unknown_end_of_document_is_named(hf_config):
    """The message names the token asked for and those that exist."""
    with pytest.raises(DataError, match=r"no token '</s>'.*<\|endoftext\|>"):
        load_tokenizer(hf_config.model_copy(update={"end_of_document": "</s>"}))


@pytest.mark.parametrize("kind", ["hf_config", "tiktoken_config"])
def test_fingerprint_follows_the_file(kind, request):
    """The same file has the same fingerprint, and one byte more is another one."""
    cfg = request.getfixturevalue(kind)
    before = load_tokenizer(cfg).fingerprint
    assert load_tokenizer(cfg).fingerprint == before
    with open(cfg.file, "a") as file:
        file.write("\n")
    assert load_tokenizer(cfg).fingerprint != before


def test_a_changed_rank_file_is_read_again(tiktoken_config):
    """Within one process and at the same path, the new ranks are used (tiktoken's own loader would not)."""
    assert len(load_tokenizer(tiktoken_config).encode_batch(["ret"])[0]) == 1
    with open(tiktoken_config.file) as file:
        lines = file.readlines()
    with open(tiktoken_config.file, "w") as file:
        file.writelines(lines[:-1])
    assert len(load_tokenizer(tiktoken_config).encode_batch(["ret"])[0]) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is broken"),
        ("AA== 0\nnot!base64 1\n", ":2|is broken"),
        ("AA==\n", "is broken"),
        ("", "is broken"),
    ],
)
@pytest.mark.parametrize("kind", ["hf_config", "tiktoken_config"])
def test_broken_files_are_named(kind, content, message, request):
    """A broken tokenizer file is named (with the line where there are lines)."""
    cfg = request.getfixturevalue(kind)
    with open(cfg.file, "w") as file:
        file.write(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(cfg)
    assert cfg.file in caught.value.where
    assert caught.value.exit_code == 2


def test_missing_file_is_named(hf_config):
    """A missing file is an error that names its path."""
    with pytest.raises(DataError, match=r"cannot be read.*nowhere"):
        load_tokenizer(hf_config.model_copy(update={"file": "nowhere/tokenizer.json"}))


def test_a_bad_pattern_is_named(tiktoken_config):
    """A pattern that is no regular expression names its option."""
    with pytest.raises(DataError, match=r"tokenizer\.pattern"):
        load_tokenizer(tiktoken_config.model_copy(update={"pattern": "(unclosed"}))


@pytest.mark.parametrize(
    ("kind", "library", "extra"),
    [("hf_config", "tokenizers", "hf"), ("tiktoken_config", "tiktoken", "tiktoken")],
)
def test_missing_library_names_the_extra(kind, library, extra, request, monkeypatch):
    """Without the library, the message is the command that installs it."""
    cfg = request.getfixturevalue(kind)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError) as caught:
        load_tokenizer(cfg)
    assert f"pip install 'elastic-islands[{extra}]'" in str(caught.value)
