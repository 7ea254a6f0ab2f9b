"""Hugging Face models: from a local folder or a config, and our decoder in their layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from elastic.base.config import DecoderModel, HuggingFaceModel
from elastic.base.errors import ConfigError, ElasticError
from elastic.training.digest import digest
from elastic.training.hf_layout import from_hugging_face, our_name, to_hugging_face
from elastic.training.model import blocks_of, build_model
from elastic.training.shard import parameters_of

pytestmark = pytest.mark.unit

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

VOCAB, SEQ_LEN = 61, 24
LAYOUTS = [
    {},
    {"num_kv_heads": 2},
    {"tied_head": False},
    {"qk_norm": True, "num_kv_heads": 1, "rope_theta": 500.0},
    {"qk_norm": True, "tied_head": False},
]


def _decoder(**changes: object) -> DecoderModel:
    return DecoderModel.model_validate({"d_model": 32, "num_layers": 2, "num_heads": 4, **changes})


def _folder(tmp_path: Path, cfg: DecoderModel, seed: int = 1) -> tuple[Path, torch.nn.Module]:
    """A Hugging Face folder of a decoder whose norms are not all ones, and the decoder."""
    model = build_model(cfg, VOCAB, SEQ_LEN, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    config, state = to_hugging_face(dict(model.named_parameters()), cfg, VOCAB, SEQ_LEN)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.detach() for name, tensor in state.items()}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, model


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("changes", LAYOUTS)
def test_transformers_computes_the_same_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    """Llama, or Qwen3 with qk_norm, loads every tensor and gives our logits within 1e-5."""
    cfg = _decoder(**changes)
    folder, model = _folder(tmp_path, cfg)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if cfg.qk_norm else "LlamaForCausalLM")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(theirs(_tokens()).logits, model(_tokens()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", LAYOUTS)
def test_there_and_back(changes: dict[str, object]) -> None:
    """Renaming to Hugging Face and back gives every tensor under its own name, in order."""
    cfg = _decoder(**changes)
    state = dict(build_model(cfg, VOCAB, SEQ_LEN, 0).named_parameters())
    _, theirs = to_hugging_face(state, cfg, VOCAB, SEQ_LEN)
    back = from_hugging_face(theirs | {"lm_head.weight": theirs.get("lm_head.weight", None)}, cfg)
    assert list(back) == list(state)
    assert all(back[name] is state[name] for name in state)
    assert {our_name(name) for name in theirs} == set(state)
    assert our_name("model.layers.0.self_attn.rotary.inv_freq") is None


def test_a_state_of_another_model_is_refused() -> None:
    """Missing and unknown names are listed, in both directions."""
    state = dict(build_model(_decoder(), VOCAB, SEQ_LEN, 0).named_parameters())
    with pytest.raises(ElasticError, match=r"missing \['head.weight'\]"):
        to_hugging_face(state, _decoder(tied_head=False), VOCAB, SEQ_LEN)
    _, theirs = to_hugging_face(state, _decoder(), VOCAB, SEQ_LEN)
    with pytest.raises(ElasticError, match=r"unknown .*model\.layers\.1"):
        from_hugging_face(theirs, _decoder(num_layers=1))


# -------------------------------------------------------------------------------------- build


def test_weights_of_a_folder_are_loaded(tmp_path: Path) -> None:
    """`weights: true` starts from the folder's weights, under their names behind `hf.`."""
    folder, model = _folder(tmp_path, _decoder())
    built = build_model(HuggingFaceModel(kind="hf", path=str(folder), weights=True), VOCAB, SEQ_LEN, 0)
    with torch.no_grad():
        torch.testing.assert_close(built(_tokens()), model(_tokens()), rtol=0, atol=1e-5)
    names = list(parameters_of(built))
    assert names[0] == "hf.model.embed_tokens.weight"
    assert "hf.lm_head.weight" not in names  # tied: travels once
    assert len(blocks_of(built)) == 2


def test_a_config_gives_fresh_seeded_weights(tmp_path: Path) -> None:
    """From a folder or its config.json, the seed decides, and the process's random state stays."""
    folder, _ = _folder(tmp_path, _decoder())
    before = torch.get_rng_state()

    def bits(path: Path, seed: int) -> str:
        built = build_model(HuggingFaceModel(kind="hf", path=str(path)), VOCAB, SEQ_LEN, seed)
        return digest(dict(built.named_parameters()))

    assert bits(folder, 3) == bits(folder / "config.json", 3) != bits(folder, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_models_vocabulary_may_be_larger(tmp_path: Path) -> None:
    """A tokenizer with fewer tokens than the model is fine; one with more is refused with both numbers."""
    folder, _ = _folder(tmp_path, _decoder())
    cfg = HuggingFaceModel(kind="hf", path=str(folder))
    assert build_model(cfg, VOCAB - 5, SEQ_LEN, 0)(_tokens()).shape[-1] == VOCAB
    with pytest.raises(ConfigError, match=f"knows {VOCAB} tokens, the tokenizer {VOCAB + 1}"):
        build_model(cfg, VOCAB + 1, SEQ_LEN, 0)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    """Too few positions, a hub name, a file for weights, and a model that is no causal LM."""
    folder, _ = _folder(tmp_path, _decoder())

    def build(path: object, seq_len: int = SEQ_LEN, weights: bool = False) -> None:
        build_model(HuggingFaceModel(kind="hf", path=str(path), weights=weights), VOCAB, seq_len, 0)

    with pytest.raises(ConfigError, match=f"has {SEQ_LEN} positions, data.seq_len is {SEQ_LEN + 1}"):
        build(folder, seq_len=SEQ_LEN + 1)
    with pytest.raises(ConfigError, match="not fetched from the hub"):
        build("meta-llama/Llama-3-8B")
    with pytest.raises(ConfigError, match="needs the folder"):
        build(folder / "config.json", weights=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="cannot build a causal LM"):
        build(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot build a causal LM"):
        build(tmp_path / "other")


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    """A folder that lacks a tensor is refused by its name instead of starting half fresh."""
    folder, _ = _folder(tmp_path, _decoder())
    file = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    del tensors["model.norm.weight"]
    safetensors_torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 missing keys, first model\.norm\.weight"):
        build_model(HuggingFaceModel(kind="hf", path=str(folder), weights=True), VOCAB, SEQ_LEN, 0)


def test_code_in_a_folder_does_not_run(tmp_path: Path) -> None:
    """A folder that brings its own model code is refused, and the code is not executed."""
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError):
        build_model(HuggingFaceModel(kind="hf", path=str(tmp_path)), VOCAB, SEQ_LEN, 0)
    assert not (tmp_path / "ran").exists()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without `transformers` the message says which extra to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'elastic-islands\[hf\]'"):
        build_model(HuggingFaceModel(kind="hf", path=str(tmp_path)), VOCAB, SEQ_LEN, 0)
