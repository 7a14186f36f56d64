"""`partway plan`: a model of one's own from the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import partway as pw
from partway.commands.cli import app
from partway.commands.plan_command import CommandLine, planned

MADE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 256), nn.Linear(256, width)

    def forward(self, x, y=None):
        out = self.down(torch.relu(self.up(x)))
        return out if y is None else (out - y).square().mean()

class Asks(Model):
    def forward(self, x):
        return self.up(x) if x.sum() > 0 else x @ self.up.weight.T

built = Model()

def build(): return Model(), (torch.randn(16, 64), torch.randn(16, 64))
def one(): return Model(), torch.randn(16, 64)
def named(): return Model(), {"x": torch.randn(16, 64), "y": torch.randn(16, 64)}
def elsewhere(): return Model(), [torch.randn(16, 64, device="cpu")]
def needs(width): return Model(width)
def number(): return 3
def words(): return Model(), "none"
def values(): return Model(), torch.randn(16, 64 if torch.ones(()).item() else 1)
"""
MESH = ("--mesh", "dp=2,tp=4")
X = ("--input", "float32[16,64]")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "planned_here.py").write_text(MADE, encoding="utf-8")


def command(name: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", f"planned_here:{name}", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_plan_is_printed_and_saved_and_made_a_page(tmp_path: Path) -> None:
    code, output = command(
        "build", *MESH, "--in", "dp,None", "--in", "auto", "--param", "up.weight=tp,None", "--save", "plan.json",
        "--html", "plan.html",
    )  # fmt: skip
    assert code == 0, output
    assert output.startswith("plan on dp=2, tp=4\n")
    assert "up linear" in output
    assert output.endswith("wrote plan.json\nwrote plan.html\n")
    plan = pw.Plan.load("plan.json")
    layouts = {tensor.name: tensor.codes for tensor in plan.inputs}
    assert (layouts["x"], layouts["up.weight"]) == (("S0", "R"), ("R", "S0"))
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("build", ()),
        ("one", ()),
        ("named", ()),
        ("elsewhere", ()),
        ("Model", X),
        ("built", X),
        ("Model", (*X, "--input", "y=float32[16,64]")),
        ("values", ("--real",)),
    ],
)
def test_a_function_a_class_and_a_model_are_planned(name: str, inputs: tuple[str, ...]) -> None:
    code, output = command(name, "--mesh", "dp=2", *inputs)
    assert (code, output.splitlines()[0]) == (0, "plan on dp=2"), output


def test_a_file_is_planned_on_the_cheapest_mesh_for_a_number_of_devices_and_without_a_backward() -> None:
    plan = planned(
        CommandLine(
            "planned_here.py:one", devices=4, profile="a100", search_mode="sharding_propagation", inference=True
        )
    )
    assert plan.mesh.device_num == 4
    assert plan.memory is not None
    assert not [c for c in plan.collectives if c.phase == "backward"]


def test_arguments_may_be_split_by_name() -> None:
    plan = planned(CommandLine("planned_here:build", "dp=2", in_strategy=("y=dp,None",), out_strategy=("()",)))
    assert next(tensor for tensor in plan.inputs if tensor.name == "y").codes == ("S0",)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        (
            "build",
            (),
            "on which devices? write --mesh dp=2,tp=4, or --devices 8 for the cheapest mesh of eight",
        ),
        (
            "build",
            (*MESH, "--devices", "8"),
            "--mesh says how many devices there are; leave --devices out",
        ),
        (
            "needs",
            MESH,
            "planned_here:needs is called without arguments, and needs width; give them defaults, or name a "
            "function that makes the model",
        ),
        (
            "number",
            MESH,
            "planned_here:number must return an nn.Module, or (an nn.Module, its inputs), not int",
        ),
        (
            "words",
            MESH,
            "the inputs that planned_here:words returns must be a tensor, a tuple of arguments or a dict by "
            "name, not str",
        ),
        (
            "build",
            (*MESH, *X),
            "planned_here:build returns a model with its inputs; leave --input out",
        ),
        (
            "Model",
            MESH,
            "planned_here:Model is a model alone; say what it is called with, as in --input 'float32[16,64]' "
            "for each argument, or have the function return (model, inputs)",
        ),
        (
            "Model",
            (*MESH, "--input", "x=float32[16,64]", *X),
            "--input 'float32[16,64]': arguments with names come last, each once",
        ),
        (
            "Model",
            (*MESH, "--input", "z=float32[16,64]"),
            "planned_here:Model: Model takes (x, y=None), and its call does not fit: missing a required argument: 'x'",
        ),
        (
            "build",
            (*MESH, "--param", "up.weight"),
            "--param 'up.weight' is not NAME=STRATEGY; write it as in 'blocks.*.weight=tp,None'",
        ),
        (
            "build",
            (*MESH, "--in", "x=dp,None", "--in", "dp,None"),
            "--in: name each argument, once, as in x=dp,None; or none, and write them in order",
        ),
        (
            "build",
            (*MESH, "--in", "pp,None"),
            "1 problem with strategies on the mesh dp=2, tp=4:\n  - input 'x': dim 0 names the axis 'pp', "
            "which the mesh (dp=2, tp=4) lacks; did you mean 'tp'?",
        ),
        (
            "build",
            (*MESH, "--in", "dp"),
            "1 problem with strategies on the mesh dp=2, tp=4:\n  - input 'x': ('dp',) has 1 entry for a "
            "tensor of 2 dims [16, 64]; write one entry per dim, such as (None, None)",
        ),
        (
            "build",
            (*MESH, "--save", "none/x.json"),
            "cannot write 'none/x.json'; give the path of a file in a folder that exists",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_planned_is_an_error(name: str, arguments: tuple[str, ...], says: str) -> None:
    assert command(name, *arguments) == (2, f"partway plan: {says}\n")


def test_a_model_that_wants_values_is_told_how_to_have_them() -> None:
    code, output = command("values", "--mesh", "dp=2")
    assert code == 2
    assert output.startswith(
        "partway plan: planned_here:values(), on the meta device, where tensors have no values (--real gives them "
        "some), raised RuntimeError:\nTraceback (most recent call last):\n"
    )
    assert "in values\n" in output
    assert "_prims_common" not in output


def test_what_a_model_raises_when_it_is_captured_names_its_line() -> None:
    code, output = command("Model", "--mesh", "dp=2", "--input", "float32[16,63]")
    assert code == 2
    assert "planned_here.py:11, in forward" in output
    assert "Traceback" not in output
