"""The weights of a checkpoint are read without Partway, and Partway reads what others wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import partway as pw

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP says so even where it is told
Ranks = Callable[..., list[Any]]


class Net(nn.Module):
    """Tied weights, a buffer, a number, and dims that two ranks do not divide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("seen", torch.randint(100, (4,)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.embed(x)) * self.scale
        return result


def saved(folder: str) -> Path:
    """A checkpoint with an optimizer's states, of a model that is split under a launcher."""
    plan = {"embed.weight": ("tp", None), "inner.weight": (None, "tp")}
    model: Any = pw.shard(Net(), mesh={"tp": 2}, parameter_plan=plan)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return pw.save(folder, model, optimizer)


def assert_same(found: dict[str, Tensor]) -> None:
    expected = Net().state_dict()
    for name, tensor in found.items():
        assert tensor.dtype is expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def others(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeros like the tensors that are in the file; tied ones are there once."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name != "head.weight"}


def test_safetensors_reads_a_checkpoint(tmp_path: Path) -> None:
    file = saved(str(tmp_path)) / "model.safetensors"
    assert_same(load_file(file))
    model = Net(seed=1)
    assert load_model(model, file) == (set(), [])
    assert_same(model.state_dict())


@ALONE
def test_dcp_reads_a_checkpoint(tmp_path: Path) -> None:
    state = others(Net().state_dict())
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(saved(str(tmp_path)))), no_dist=True)
    assert_same(state)


def read_as_dtensors(folder: str) -> None:
    """What two ranks saved, into DTensors that lie otherwise."""
    at = saved(folder)
    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1) if tensor.dim() else Replicate()])
        for name, tensor in others(Net().state_dict()).items()
    }
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(at)))
    assert_same({name: tensor.full_tensor() for name, tensor in state.items()})
    dist.barrier()


@pytest.mark.gloo
def test_dcp_reads_a_checkpoint_into_dtensors(tmp_path: Path, on_ranks: Ranks) -> None:
    on_ranks(2, read_as_dtensors, str(tmp_path))


def test_transformers_reads_a_checkpoint_beside_its_configuration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=4))
    at = pw.save(tmp_path, pw.shard(model, mesh={"dp": 2}))
    model.config.save_pretrained(at)
    found, about = AutoModelForCausalLM.from_pretrained(at, output_loading_info=True)
    assert not any(about.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@ALONE
@pytest.mark.parametrize("writer", ["safetensors", "dcp"])
def test_what_others_wrote_is_read(tmp_path: Path, writer: str) -> None:
    if writer == "dcp":
        state = {name: tensor for name, tensor in Net().state_dict().items() if name != "head.weight"}
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
    else:
        save_model(Net(), str(tmp_path / "model.safetensors"))
    model: Any = pw.shard(Net(seed=1), mesh={"dp": 2})
    assert pw.load(tmp_path, model) == {}
    assert_same(model.state_dict())
