"""An exported folder is the same model, with the same tokens, in `transformers`."""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.base.config import (
    Budget,
    Data,
    DecoderModel,
    HuggingFaceModel,
    Job,
    PythonModel,
    TiktokenTokenizer,
    TokenizersTokenizer,
)
from elastic.base.errors import ConfigError, RunFolderError
from elastic.state.export import export_run
from elastic.state.hf_tokenizer import byte_level_json
from elastic.state.outer_store import OuterStore
from elastic.state.records import load_records
from elastic.state.run_file import write_run
from elastic.state.storage import Storage
from elastic.training.model import build_model
from elastic.training.shard import parameters_of
from elastic.training.tokenizer import ByteTokenizer
from elastic.training.tokenizer import TiktokenTokenizer as OurTiktoken

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.unit

VOCAB, SEQ_LEN = 257, 24
TINY = {"d_model": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 48}
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(folder: Path, steps: int = 3, **job: Any) -> tuple[Storage, torch.nn.Module]:
    """A run of a few outer steps, and the model with its outer parameters."""
    storage = Storage(folder)
    job.setdefault("data", Data(seq_len=SEQ_LEN))
    value = Job(name="run", budget=Budget(tokens=1000), **job)
    value = value.model_copy(
        update={"outer": value.outer.model_copy(update={"lr": 0.7, "momentum": 0.9, "codec_down": "bf16"})}
    )
    model = build_model(value.model, VOCAB, SEQ_LEN, seed=1)
    write_run(storage, {"run": "run-1", "job": value.model_dump(mode="json"), "vocab_size": VOCAB})
    initial = {name: p.detach().clone() for name, p in parameters_of(model).items()}
    store = OuterStore.open(
        storage, value, "run-1", 1, load_records(storage), lambda: [initial],
        {"total_sequences": 100, "block_sequences": 4}, lambda *entry: None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for version in range(1, steps + 1):
        delta = {name: 0.05 * torch.randn(t.shape, generator=generator) for name, t in initial.items()}
        store.commit_outer(0, version, [], store.committed, delta, 1.0)
    with torch.no_grad():
        for name, parameter in parameters_of(model).items():
            parameter.copy_(store.states[0].theta[name])
    return storage, model.eval()


def largest_difference(model: torch.nn.Module, folder: Path) -> float:
    """Between our logits and those of `transformers`, which must load the folder without a complaint."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((loaded.eval()(tokens).logits - model(tokens)).abs().max())


@pytest.mark.parametrize(
    "extra",
    [{}, {"tied_head": False}, {"qk_norm": True}, {"num_kv_heads": 2, "rope_theta": 500.0, "norm_eps": 1e-4}],
    ids=["tied", "untied", "qk-norm", "grouped"],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, extra: dict[str, Any]) -> None:
    """Every kind of our decoder, exported and loaded by transformers, differs by rounding at most."""
    storage, model = train(tmp_path / "run", model=DecoderModel(**TINY, **extra))
    exported = export_run(storage, tmp_path / "out")
    assert largest_difference(model, tmp_path / "out") < 1e-5
    assert (exported.version, exported.parameters, exported.loads_in_transformers) == (3, "theta", True)
    assert exported.num_parameters == sum(p.numel() for p in model.parameters())
    assert exported.notes == []
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(
        exported.files
    )
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1


def test_a_hugging_face_model_keeps_its_own_configuration(tmp_path: Path) -> None:
    """A model of kind `hf` is exported with its own class and loads with equal logits."""
    config = transformers.GPT2Config(vocab_size=300, n_positions=SEQ_LEN, n_embd=32, n_layer=2, n_head=4)
    config.save_pretrained(tmp_path / "gpt2")
    storage, model = train(tmp_path / "run", model=HuggingFaceModel(kind="hf", path=str(tmp_path / "gpt2")))
    export_run(storage, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gpt2"
    assert largest_difference(model, tmp_path / "out") < 1e-5


def test_a_model_of_ones_own_is_exported_as_tensors(tmp_path: Path) -> None:
    """Without a layout that transformers knows, the trained tensors are written and it is said."""
    from safetensors.torch import load_file

    own = PythonModel(kind="python", entry="test_export_model:a_model")
    (tmp_path / "test_export_model.py").write_text(
        "import torch\n\ndef a_model(vocab_size, seq_len):\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(vocab_size, 8), torch.nn.Linear(8, vocab_size))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        storage, model = train(tmp_path / "run", model=own)
    exported = export_run(storage, tmp_path / "out")
    assert not exported.loads_in_transformers
    assert "your own" in exported.notes[0]
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(written[name], p) for name, p in model.named_parameters())


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """Nothing is overwritten; an empty folder may be given."""
    storage, _ = train(tmp_path / "run", model=DecoderModel(**TINY))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep me")
    with pytest.raises(ConfigError, match="not empty"):
        export_run(storage, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    export_run(storage, tmp_path / "empty")
    with pytest.raises(ConfigError, match="not empty"):
        export_run(storage, tmp_path / "full" / "mine")


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing breaks in the middle, neither the folder nor a leftover is there."""
    from elastic.state import export

    def broken(*_args: object) -> None:
        raise OSError("disk full")

    storage, _ = train(tmp_path / "run", model=DecoderModel(**TINY))
    monkeypatch.setattr(export, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        export_run(storage, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_no_run_and_no_version_are_said(tmp_path: Path) -> None:
    """An empty folder and a run that has not begun are refused with exit code 2."""
    with pytest.raises(RunFolderError, match="not a run folder"):
        export_run(Storage(tmp_path / "run"), tmp_path / "out")
    write_run(
        Storage(tmp_path / "run"), {"run": "r", "job": Job(name="r", budget=Budget(tokens=1)).model_dump()}
    )
    with pytest.raises(RunFolderError, match="no version yet"):
        export_run(Storage(tmp_path / "run"), tmp_path / "out")


def test_an_older_version_is_exported_if_the_newest_is_damaged(tmp_path: Path) -> None:
    """The notes name the file that could not be used."""
    storage, _ = train(tmp_path / "run", model=DecoderModel(**TINY))
    name = storage.list("outer")[-1]
    storage.write(name, storage.read(name)[:-1] + b"\0\0")
    exported = export_run(storage, tmp_path / "out")
    assert exported.version == 2
    assert name in exported.notes[0]


# ----------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on bytes, exported."""
    folder = tmp_path_factory.mktemp("bytes")
    storage, _ = train(folder / "run", model=DecoderModel(**TINY))
    export_run(storage, folder / "out")
    return folder / "out"


@given(st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_exported_bytes_are_ours(bytes_folder: Path, text: str) -> None:
    """Any text has the ids of its UTF-8 bytes in `tokenizers`, and comes back."""
    tokenizer = tokenizers.Tokenizer.from_file(str(bytes_folder / "tokenizer.json"))
    expected = ByteTokenizer().encode_batch([text])[0].tolist()
    assert tokenizer.encode(text, add_special_tokens=False).ids == expected
    assert tokenizer.decode(expected) == text


def test_transformers_tokenises_as_the_run_did(bytes_folder: Path) -> None:
    """AutoTokenizer gives our ids, also for text that spells out the end of a document; 256 ends one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bytes_folder)
    for text in ("plain", "  two  blanks ", "äöü 漢字 🙂\n\t", "a<|endoftext|>b", "don 't", ""):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256 == ByteTokenizer.end_of_document
    assert len(tokenizer) == ByteTokenizer.vocab_size
    assert tokenizer.decode([104, 105, 256], skip_special_tokens=True) == "hi"
    config = json.loads((bytes_folder / "config.json").read_text())
    assert config["eos_token_id"] == 256


def learn_ranks(text: str, merges: int) -> dict[bytes, int]:
    """Byte pairs in the order in which plain BPE training finds them."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in text.replace(" ", "  ").split(" ")]
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        (left, right), _ = max(pairs.items(), key=lambda entry: (entry[1], entry[0]))
        ranks.setdefault(left + right, len(ranks))
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    return ranks


@pytest.mark.parametrize("pattern", [GPT2, CL100K], ids=["gpt2", "cl100k"])
def test_tiktoken_ranks_become_a_tokenizer_file_with_the_same_ids(tmp_path: Path, pattern: str) -> None:
    """The converted file gives, on texts of many scripts, the ids that tiktoken gives."""
    pytest.importorskip("tiktoken")
    source = Path(json.__file__).read_text() * 2 + "äöü 漢字 漢字 the quick brown fox 12345 " * 20
    ranks = learn_ranks(source, 300)
    file = tmp_path / "my.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in ranks.items()))
    cfg = TiktokenTokenizer(kind="tiktoken", file=str(file), pattern=pattern)
    storage, _ = train(
        tmp_path / "run", model=DecoderModel(**TINY), data=Data(seq_len=SEQ_LEN, tokenizer=cfg)
    )
    exported = export_run(storage, tmp_path / "out")
    assert exported.notes == []
    ours, theirs = OurTiktoken(cfg), tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    chosen = np.random.default_rng(0)
    letters = source[:5000] + "äöüß漢字🙂\n\t  '''"
    texts = [source[:3000], "I'll DON'T it's 123456 \n\n  x", *(
        "".join(letters[i] for i in chosen.integers(0, len(letters), 40)) for _ in range(200)
    )]  # fmt: skip
    for text, expected in zip(texts, ours.encode_batch(texts), strict=True):
        assert theirs.encode(text, add_special_tokens=False).ids == expected.tolist()
        assert theirs.decode(expected.tolist()) == text
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == ours.end_of_document


def test_a_tokenizers_file_is_copied(tmp_path: Path) -> None:
    """The run's own tokenizer.json goes along; if it is gone from this machine, the notes say so."""
    content = byte_level_json({bytes([i]): i for i in range(256)}, None, "<end>")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content))
    cfg = TokenizersTokenizer(kind="tokenizers", file=str(file), end_of_document="<end>")
    storage, _ = train(
        tmp_path / "run", model=DecoderModel(**TINY), data=Data(seq_len=SEQ_LEN, tokenizer=cfg)
    )
    export_run(storage, tmp_path / "out")
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == content
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == 256
    assert tokenizer("a<end>b")["input_ids"] == list(b"a<end>b")
    file.unlink()
    exported = export_run(storage, tmp_path / "out2")
    assert "no tokenizer files" in exported.notes[0]
    assert "mine.json" in exported.notes[0]
    assert exported.loads_in_transformers
