"""Folders of Hugging Face's with other names than the model's, read into a sharded model."""

import sys
from pathlib import Path

import pytest
import torch

import partway as pw
from partway.strategy import RuntimeStateError

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

from test_mixtures import model_of  # noqa: E402

NAMES = ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"]


def read(folder, name, ranks, axes):
    """A model whose weights are others is sharded, called, and reads the folder."""
    plain, ids = model_of(name, "batched_mm"), torch.arange(32).view(4, 8)
    model = model_of(name, "batched_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    sharded = pw.shard(model, ((ranks, 1),), mesh=axes)
    before = sharded(input_ids=ids, labels=ids, use_cache=False).loss
    pw.load(folder, model)
    for key, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, plain.state_dict()[key]), key
    with torch.no_grad():
        found, expected = (each(input_ids=ids, labels=ids, use_cache=False).loss for each in (sharded, plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (before - expected).abs() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_mixture_reads_the_folder_of_its_plain_one(name, tmp_path):
    model_of(name, "batched_mm").save_pretrained(tmp_path)
    read(tmp_path, name, 4, {"dp": 2, "ep": 2})


@pytest.mark.gloo
def test_processes_read_their_parts_of_experts(on_ranks, tmp_path):
    model_of("Mixtral", "batched_mm").save_pretrained(tmp_path)
    on_ranks(2, read, tmp_path, "Mixtral", 2, {"dp": 2})


def test_a_folder_of_another_number_of_experts_is_refused(tmp_path):
    small = transformers.MixtralConfig(**model_of("Mixtral", "batched_mm").config.to_dict() | {"num_local_experts": 3})
    transformers.MixtralForCausalLM(small).save_pretrained(tmp_path)
    model = model_of("Mixtral", "batched_mm")
    with pytest.raises(
        RuntimeStateError, match=r"experts.gate_up_proj: has shape \[4, 48, 16\], and in the checkpoint"
    ):
        pw.load(tmp_path, model)
