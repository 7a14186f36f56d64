"""Models of Hugging Face's: saved and loaded as in one process, each rank its parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import whole
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import partway as pw
from partway.strategy import RuntimeStateError

Ranks = Callable[..., list[Any]]

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=66, n_positions=16)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                      num_key_value_heads=2, num_local_experts=4, vocab_size=66)
    ),
}  # fmt: skip


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]().double().eval()


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(32).view(4, 8) % 66
    return {"input_ids": ids, "labels": ids}


def sharded(name: str, seed: int = 0) -> Any:
    return pw.shard(made(name, seed), mesh={"dp": 2}, in_strategy={"input_ids": ("dp", None), "labels": ("dp", None)})


def saves(folder: str, name: str, called: bool, **options: Any) -> None:
    model = sharded(name)
    if called:
        model(**tokens())
    model.save_pretrained(folder, **options)


def loads(folder: str, name: str) -> None:
    """Weights of Hugging Face's folder, into a sharded model with other values."""
    model = sharded(name, seed=1)
    pw.load(folder, model)
    for one, other in zip(model.parameters(), made(name).parameters(), strict=True):
        assert torch.equal(whole(one), other)


def assert_loads(folder: Path, name: str) -> None:
    """transformers reads what was saved, and so does a sharded model in one process."""
    expected = made(name)
    model, about = type(expected).from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    assert not any(about.values())
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_in_one_process(tmp_path: Path, name: str) -> None:
    saves(str(tmp_path), name, called=name == "gpt2")  # the other has kernels for lower precision only
    assert_loads(tmp_path, name)


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "called"), [("gpt2", False), ("gpt2", True), ("mixtral", False)])
def test_under_a_launcher(tmp_path: Path, name: str, called: bool, on_ranks: Ranks) -> None:
    (tmp_path / ".saving").mkdir()
    (tmp_path / ".saving" / "notes").write_text("mine")
    on_ranks(2, saves, str(tmp_path), name, called)
    assert (tmp_path / ".saving" / "notes").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [".saving", "config.json", "generation_config.json", "model.safetensors"]
    assert_loads(tmp_path, name)
    on_ranks(2, loads, str(tmp_path), name)


def saves_in_pieces(folder: str) -> list[str]:
    model = sharded("gpt2")
    model.save_pretrained(folder, max_shard_size="20KB")
    said = []
    for options in ({"state_dict": model.state_dict()}, {"push_to_hub": True}, {"max_shard_size": "much"}):
        with pytest.raises(RuntimeStateError) as error:
            model.save_pretrained(folder, **options)
        said.append(str(error.value))
    return said


@pytest.mark.gloo
def test_large_models_have_several_files_and_what_needs_whole_weights_is_refused(
    tmp_path: Path, on_ranks: Ranks
) -> None:
    for said in on_ranks(2, saves_in_pieces, str(tmp_path)):
        assert said[0].startswith("save_pretrained of GPT2LMHeadModel takes no state_dict under a launcher, where each")
        assert said[1].startswith("save_pretrained of GPT2LMHeadModel takes no push_to_hub under a launcher")
        assert said[2] == "max_shard_size is 'much'; write a number of bytes, or a text such as '5GB'"
    assert "model.safetensors.index.json" in os.listdir(tmp_path)
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".safetensors")]) > 3
    assert_loads(tmp_path, "gpt2")
