"""`partway bench fusion`: what it compares, what it shows and writes, and what it refuses (no times)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from partway.commands.cli import app
from partway.fusion import Fusion
from partway.measure import bench
from partway.measure.bench import (
    BenchResult,
    Case,
    ContenderFigures,
    bench_fusion,
    check_plot,
    gradients_of,
    policies,
    workload,
)
from partway.measure.workloads import gpt2, mlp, tiny
from partway.propagation.cost.profile import profile_of
from partway.strategy import RuntimeStateError

NAMES = ["unfused", "auto", "size 1", "size 4", "size 16", "size 64", "index thirds", "index eighths", "overlap"]


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "fusion", *arguments])
    return result.exit_code, result.output


def compared(rounds: int = 3) -> BenchResult:
    """Two contenders with made-up figures."""
    case = Case("mlp", 2, "cpu", rounds, False, policies(12), "profile.json", "overlap", False)
    seconds = tuple(0.01 * (i + 1) for i in range(rounds))
    ours = ContenderFigures("overlap", 3, 3 << 20, seconds, seconds, 0.01, 0.002)
    ddp = ContenderFigures("DDP", 2, 2 << 20, tuple(2 * s for s in seconds), seconds, None, None)
    return BenchResult(case, profile_of("cpu"), 12, (ours, ddp), {"torch": "0"})


# -- What is compared --------------------------------------------------------------------------------------------------


def test_indices_are_those_that_there_are_gradients_for() -> None:
    assert list(policies(12)) == NAMES
    assert policies(12)["index thirds"] == {"mode": "index", "config": [4, 8]}
    assert [name for name in policies(2) if name.startswith("index")] == []
    assert policies(36)["index [20, 35]"] == {"mode": "index", "config": [20, 35]}
    assert "index [20, 35]" not in policies(35)


@pytest.mark.parametrize("gradients", range(3, 41))
def test_every_policy_is_one_that_the_context_takes(gradients: int) -> None:
    for policy in filter(None, policies(gradients).values()):
        assert Fusion.from_option(policy).option["mode"] == policy["mode"]
        assert max(policy.get("config") or [0], default=0) < gradients if policy["mode"] == "index" else True


def test_gradients_are_counted_that_a_policy_can_group() -> None:
    work = tiny("gpt2")
    # the gradient of the positions is reduced where they are added to the tokens, before it is a parameter's
    assert gradients_of(work, 2) == len(list(work.model(torch.float32).parameters())) - 1 == 35


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_what_is_checked_has_as_many_gradients_as_what_is_timed(name: str) -> None:
    with torch.device("meta"):
        timed, checked = (len(list(workload(name, small=small).build().parameters())) for small in (False, True))
    assert timed == checked


def test_models_are_the_same_for_everyone_who_asks() -> None:
    for work in (gpt2(1, 8, width=16, vocabulary=32), mlp(8, 2)):
        first, second = (work.model(torch.float64).state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert all(map(torch.equal, work.tensors(4, torch.float32), work.tensors(4, torch.float32)))


# -- What is shown -----------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_contender() -> None:
    lines = compared().report().splitlines()
    assert lines[0].startswith("mlp, 12 gradients, 2 processes on cpu: milliseconds of a step, median (min-max)")
    ours, ddp = (next(line for line in lines if line.startswith(name)) for name in ("overlap", "DDP"))
    assert re.split(r" {2,}", ours.strip()) == [
        "overlap", "3", "3.0", "20.0 (10.0-30.0)", "0.500 (0.500-0.500)", "20.0 (10.0-30.0)", "10.0", "0.50"
    ]  # fmt: skip
    assert re.split(r" {2,}", ddp.strip())[:3] == ["DDP", "2", "2.0"]
    assert len(re.split(r" {2,}", ddp.strip())) == 6


def test_the_figures_are_json() -> None:
    data = json.loads(json.dumps(compared().data()))
    assert (data["model"], data["world"], data["gradients"], data["torch"]) == ("mlp", 2, 12, "0")
    assert data["profile"]["name"] == "cpu"
    assert data["policies"]["size 4"] == {"mode": "size", "config": 4}
    ours, ddp = data["contenders"]
    assert ours["ratio_to_ddp"] == [0.5, 0.5, 0.5]
    assert ours["predicted_over_measured"] == pytest.approx(0.5)
    assert (ddp["predicted"], ddp["predicted_over_measured"]) == (None, None)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_figures_are_drawn(tmp_path: Path, rounds: int) -> None:
    pytest.importorskip("matplotlib")
    compared(rounds).draw(tmp_path / "fusion.png")
    assert (tmp_path / "fusion.png").read_bytes().startswith(b"\x89PNG")


# -- What is refused, before anything is measured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--model", "vit"),
            "there is no model 'vit'; write gpt2, resnet50, mlp, or module:function for your own model",
        ),
        (("--world", "0"), "world is 0; it must be 1 or more"),
        (("--rounds", "0"), "rounds is 0; it must be 1 or more"),
        (("--device", "tpu"), "device is 'tpu'; it must be 'cpu' or 'cuda'"),
        (
            ("--quick", "--model", "mlp", "--timeline", "t.json", "--of", "DDP"),
            f"no contender 'DDP' has a timeline; write one of {', '.join(NAMES)}",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_measured_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "calibrate", lambda *_, **__: pytest.fail("measured"))
    assert command(*arguments) == (2, f"partway bench fusion: {says}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_profile_is_an_error() -> None:
    code, output = command("--profile", "abacus")
    assert code == 2
    assert output.startswith("partway bench fusion: ")
    assert "'abacus'" in output


@pytest.mark.parametrize("option", ["--json", "--plot", "--timeline", "--html"])
@pytest.mark.parametrize("path", ["missing/x", "."])
def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path, option: str, path: str) -> None:
    where = str(tmp_path / path)
    said = f"partway bench fusion: cannot write {where!r}; give the path of a file in a folder that exists\n"
    assert command(option, where) == (2, said)


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    check_plot(None)
    with pytest.raises(RuntimeStateError) as error:
        check_plot(Path("x.png"))
    assert str(error.value) == "a plot needs matplotlib; install it with: pip install '.[demo]' in Partway's checkout"


# -- A model of the user's own -----------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).square().mean()  # type: ignore[no-any-return]


MADE = """
import torch
from torch import nn

def model(samples): return nn.Linear(4, 4), (torch.ones(samples, 4),)
def no_batch(samples): return nn.Linear(4, 4)
def a_list(samples): return nn.Linear(4, 4), [torch.ones(samples, 4)]
def numbers(samples): return nn.Linear(4, 4), (1, 2)
def three(samples): return nn.Linear(4, 4), (torch.ones(samples, 4), torch.ones(3, 4))
constant = 1

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.layer(x)).square().mean()

def noisy(samples): return Noisy(), (torch.ones(samples, 4),)
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "made_models", raising=False)
    (tmp_path / "made_models.py").write_text(MADE, encoding="utf-8")


def test_a_model_of_the_users_own_is_found_in_the_current_folder(made: None) -> None:
    work = workload("made_models:model", small=True)
    assert [tuple(t.shape) for t in work.tensors(6, torch.float64)] == [(6, 4)]
    assert work.tensors(6, torch.float64)[0].dtype == torch.float64
    assert (work.name, work.dims, work.own_statistics) == ("made_models:model", (2,), False)


def test_batch_norms_of_ones_own_model_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("math.a_model", lambda samples: (Small(), (torch.ones(samples, 4),)), raising=False)
    assert workload("math:a_model").own_statistics


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing:model", "cannot import the module of model 'missing:model': No module named 'missing'"),
        ("made_models:none", "module 'made_models' has no function 'none' for model 'made_models:none'"),
        ("made_models:constant", "module 'made_models' has no function 'constant' for model 'made_models:constant'"),
        ("made_models:no_batch", "made_models:no_batch(4) must return (an nn.Module, a tuple of tensors), not Linear"),
        ("made_models:a_list", "the batch of made_models:a_list(4) must be a tuple of tensors, not list"),
        ("made_models:numbers", "the batch of made_models:numbers(4) must be a tuple of tensors, not (int, int)"),
        (
            "made_models:three",
            "tensor 1 of the batch of made_models:three(4) has the shape (3, 4); its first dim must have the 4 samples",
        ),
    ],
)
def test_what_is_no_model_is_an_error(made: None, name: str, says: str) -> None:
    assert command("--model", name) == (2, f"partway bench fusion: {says}\n")


# -- A run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(1200)  # every process plans each contender twice
def test_two_processes_compare_all_contenders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, plot, timeline, html = (
        tmp_path / name for name in ("fusion.json", "fusion.png", "timeline.json", "fusion.html")
    )
    code, output = command(
        "--quick", "--model", "mlp", "--rounds", "2", "--profile", "cpu",
        "--json", str(out), "--plot", str(plot), "--timeline", str(timeline), "--of", "unfused", "--html", str(html),
    )  # fmt: skip
    assert code == 0, output
    said = capfd.readouterr().err
    assert "comparing the numbers of 10 contenders with those of one device\npartway bench fusion: timing them" in said
    assert f"wrote {out}\nwrote {plot}\nwrote {timeline}\nwrote {html}\n" in output
    found = json.loads(out.read_text(encoding="utf-8"))["contenders"]
    assert [c["name"] for c in found] == [*NAMES, "DDP"]
    assert all(len(c["seconds"]) == len(c["computed"]) == len(c["ratio_to_ddp"]) == 2 for c in found)
    by_name = {c["name"]: c for c in found}
    # the loss is one more, for it is that of the whole batch
    collectives = {name: c["collectives"] for name, c in by_name.items()}
    assert (collectives["unfused"], collectives["auto"], collectives["index eighths"]) == (13, 2, 9)
    assert collectives["DDP"] == 1
    assert {name: c["bytes"] - by_name["DDP"]["bytes"] for name, c in by_name.items()} == {
        **dict.fromkeys(NAMES, 4), "DDP": 0
    }  # fmt: skip
    assert by_name["unfused"]["predicted"] > by_name["auto"]["predicted"] > 0
    events = json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
    measured, predicted = ({e["name"] for e in events if e["pid"] == pid and e.get("tid") == 1} for pid in (0, 1))
    assert predicted == measured
    assert len(predicted) == 14  # the name of the lane, and 13 collectives
    page = html.read_text(encoding="utf-8")
    assert page.count(' role="img" tabindex="-1"') > 26
    assert re.search(r'aria-label="collectives over \w+, measured"', page)


@pytest.mark.slow
@pytest.mark.gloo
def test_what_a_process_says_is_in_the_error(made: None) -> None:
    says = (
        r"(?s)^a process failed: .*noisy: \w+ does not compute what one device does.*the loss of made_models:noisy is"
    )
    with pytest.raises(RuntimeStateError, match=says):
        bench_fusion("made_models:noisy", world=1, rounds=1, profile="cpu")
