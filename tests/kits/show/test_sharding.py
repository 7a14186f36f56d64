"""What people see of the tensors that they have in hand, by name, as a layout, in one process and in several."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from picture_layouts import LAYOUTS, boxes, picture
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import partway as pw
from partway.show.pictures.parts import listed
from partway.strategy import Mesh, StrategyError
from partway.strategy.layout import layout

SVG = "{http://www.w3.org/2000/svg}"


def sharded() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model = pw.shard(
        model, mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None),), parameter_plan={"0.weight": ("tp", None)}
    )
    model(torch.ones(4, 8)).sum().backward()
    return model


def test_names_and_parameters_of_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    model = sharded()
    by_name = pw.visualize_sharding("0.weight", of=model)
    assert by_name.title == (
        "0.weight float32[16, 8] on dp=2, tp=2: [dp:R tp:S0]; each device holds [8, 8], 256 B of 512 B"
    )
    assert capsys.readouterr().out == by_name.text + "\n"
    assert pw.visualize_sharding(model[0].weight, of=model).text == by_name.text
    assert pw.visualize_sharding("0.weight", of=model.plan).text == by_name.text
    assert pw.visualize_sharding("linear", of=model).title.startswith("linear float32[4, 16] on dp=2, tp=2: [dp:")


def test_what_a_notebook_shows_and_a_file_has(tmp_path: Path) -> None:
    found = picture("a matrix by both")
    assert found._repr_svg_() == found.svg
    assert str(found) == found.text
    found.save_svg(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text().startswith(found.svg + "\n")
    assert repr(found) == f"ShardingPicture(title={found.title!r})"


class Kernel:
    """IPython as a notebook's kernel has it."""

    config = ("IPKernelApp",)

    @staticmethod
    def get_ipython() -> Any:
        return Kernel


def test_a_notebook_draws_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", Kernel)
    pw.visualize_sharding(*LAYOUTS["whole"])
    assert not capsys.readouterr().out


def test_names_are_only_names() -> None:
    """What a module calls its parameters is text, in a terminal and in a page."""
    name = "</svg><script>alert('[bold]1')</script>"
    plan = pw.compile(lambda x, w: x @ w, (torch.ones(4, 4), torch.ones(4, 4)), mesh={"dp": 2}).plan
    hostile = plan.model_copy(update={"inputs": (plan.inputs[0].model_copy(update={"name": name}), *plan.inputs[1:])})
    found = pw.visualize_sharding(name, of=hostile)
    assert found.text.startswith(name)
    assert "<script>" not in found.svg
    assert ElementTree.fromstring(found.svg).findtext(f"{SVG}title") == found.title


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda m: ((LAYOUTS["whole"][0],), {}),
            "a Layout is of any shape; pass the shape of the tensor, as ",
        ),
        (lambda m: ((LAYOUTS["a vector"][0], ()), {}), "splits dim 0, which the shape [] lacks"),
        (
            lambda m: ((LAYOUTS["a vector"][0], (4, 0)), {}),
            "the shape [4, 0] has no elements, so there is nothing ",
        ),
        (lambda m: (("0.weight", (4, 4)), {"of": m}), "shape is for a Layout only; a tensor and a name have their own"),
        (lambda m: (("0.weight",), {}), "'0.weight' is a name; pass of=, the sharded module or the Plan that has it"),
        (lambda m: (("nobody",), {"of": m}), "the plan has no tensor 'nobody'; its inputs and outputs are 0.weight, "),
        (lambda m: (("linear[3]",), {"of": m}), "the plan has no tensor 'linear[3]'"),
        (lambda m: ((torch.ones(3),), {}), "a tensor of the shape [3] is whole on every device: it is not a DTensor, "),
        (lambda m: ((7,), {}), "7 has no layout; pass a tensor, the name of one with of=, or a Layout and a shape"),
    ],
)
def test_what_has_no_picture_is_an_error_that_says_so(given: Callable[[Any], Any], message: str) -> None:
    args, kwargs = given(sharded())
    with pytest.raises(StrategyError, match=re.escape(message)):
        pw.visualize_sharding(*args, **kwargs)


def in_processes() -> None:
    model = sharded()
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    found = pw.visualize_sharding(weight, of=model)
    assert found.text == pw.visualize_sharding("0.weight", of=model).text
    rank = torch.distributed.get_rank()
    spans = dict(boxes(found.parts))[rank]
    assert torch.equal(weight.full_tensor()[tuple(slice(*span) for span in spans)], weight.to_local())
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(30.0).view(5, 6)
    own = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    held = dict(boxes(pw.visualize_sharding(own).parts))
    assert torch.equal(whole[tuple(slice(*span) for span in held[rank])], own.to_local())
    one = distribute_tensor(whole, mesh["b"], [Replicate()])  # the devices of a part of a mesh have their own numbers
    devices = mesh["b"].mesh.flatten().tolist()
    assert f"│ {listed(devices)} " in re.sub(" +", " ", pw.visualize_sharding(one).text)


@pytest.mark.gloo
def test_in_processes(on_ranks: Callable[..., Any]) -> None:
    on_ranks(4, in_processes)


def test_a_tensor_that_a_call_left_split() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 4096)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = self.up(x)
            return scores.square().mean(), scores

    model = pw.shard(Two(), mesh={"tp": 4}, parameter_plan={"up.weight": ("tp", None), "up.bias": ("tp",)})
    _, scores = model(torch.ones(4, 8))
    assert pw.visualize_sharding(scores).title.startswith("a tensor float32[4, 4096] on tp=4: [tp:S")
    assert Mesh({"tp": 4}) == pw.visualize_sharding(scores).parts.layout.mesh
    assert layout(Mesh({"tp": 4}), pw.visualize_sharding(scores).parts.layout.placements).cuts
