"""A second start of a script finds its plans and programs on disk, and only by equal content."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_same_gradients, gradients, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import CASES

import partway as pw
from partway.compiler import passes
from partway.engine.rank_facts import of_plan
from partway.propagation.capture.capture import capture
from partway.propagation.graph.printer import operators_in
from partway.propagation.plan.stored import dump, load
from partway.propagation.program.program import Program
from partway.reuse.cache import folder_named
from partway.runtime.ranks.agreement import Fact

pytestmark = pytest.mark.deep


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a pass that the cache saves has run."""
    count: dict[str, int] = {"search": 0, "lower": 0, "differentiate": 0, "fuse_program": 0}

    def counted(name: str) -> Any:
        plain = getattr(passes, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return plain(*args, **kwargs)

        return run

    for name in count:
        monkeypatch.setattr(passes, name, counted(name))
    return count


def entries(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[2] for path in folder.glob("*/*"))


def step(name: str, **options: Any) -> tuple[Any, nn.Module]:
    """One step of a freshly made and sharded model, checked against one device."""
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.build()
    model = pw.shard(
        copy.deepcopy(plain), in_strategy=case.batch_split("dp"), **{"mesh": {"dp": 2, "tp": 2}, **options}
    )
    loss, found = gradients(model, case.batch())
    expected, wanted = gradients(plain, case.batch())
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert_same_gradients(found, wanted, 1e-10)
    return model, plain


@pytest.mark.parametrize("name", ["mlp", "convnet", "gpt2"])
def test_what_was_planned_and_compiled_is_not_made_again(folder: Path, work: dict[str, int], name: str) -> None:
    first, _ = step(name)
    assert [name.partition("-")[0] for name in entries(folder)] == ["capture", "forward", "plan", "program"]
    made = dict(work)
    assert min(made.values()) > 0
    second, _ = step(name)
    assert work == made
    assert second.plan == first.plan
    assert operators_in(str(second.program)) == operators_in(str(first.program))
    assert second.program.collectives == first.program.collectives


class Layers(nn.Module):
    """Some linear layers, in calls of torch.utils.checkpoint if `checkpoints`."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.one(layer, x)
        return x.square().mean()

    def one(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.relu(layer(x)))

        return checkpoint(both, x, use_reentrant=False) if self.checkpoints else both(x)


@pytest.mark.parametrize(
    ("options", "limit", "checkpoints"),
    [
        ({"enable_parallel_optimizer": True}, None, False),
        ({"enable_parallel_optimizer": True, "reshard_after_forward": False}, None, False),
        ({}, 4e5, False),
        ({}, None, True),
    ],
    ids=["weights are gathered again", "weights stay whole", "within a limit", "checkpoints"],
)
def test_a_plan_from_disk_makes_the_program_that_it_made_at_first(
    folder: Path, options: dict[str, bool], limit: float | None, checkpoints: bool
) -> None:
    def program() -> tuple[list[Fact], pw.Plan]:
        torch.manual_seed(0)
        pw.set_algo_parameters(memory_limit=limit)
        with pw.auto_parallel_context(**options):
            compiled = pw.compile(
                Layers(checkpoints), (torch.ones(64, 64),), mesh={"dp": 2}, in_strategy=(("dp", None),)
            )
            return list(of_plan(compiled)), compiled.plan  # also ranks that compare these have one and the other

    first, plan = program()
    for path in folder.glob("*/*.program-*"):
        path.unlink()
    assert program() == (first, plan)


def test_a_plan_from_disk_can_be_asked_why(folder: Path, work: dict[str, int]) -> None:
    first, _ = step("mlp")
    expected = str(first.plan.explain("*"))
    before = work["search"]
    second, _ = step("mlp")
    assert work["search"] == before
    assert str(second.plan.explain("*")) == expected
    assert work["search"] > before


def test_gradients_that_wait_are_kept_too(folder: Path, work: dict[str, int]) -> None:
    case, found = CASES["mlp"], []
    for _ in range(2):
        model, _ = step("mlp", mesh={"dp": 2})
        model.zero_grad()
        with model.no_sync():
            loss_of(model(**case.batch(step=0))).backward()
        loss_of(model(**case.batch(step=1))).backward()
        found.append(([p.grad for p in model.parameters()], dict(work)))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    assert found[0][1] == found[1][1]
    assert [name.partition("-")[0] for name in entries(folder)] == [
        "accumulation",
        "capture",
        "forward",
        "plan",
        "program",
    ]


CHANGES: dict[str, Any] = {
    "mesh": lambda: {"mesh": {"dp": 4, "tp": 2}},
    "level": lambda: {"level": 1},
    "parameter_plan": lambda: {"parameter_plan": {"fc1.weight": ("tp", None)}},
    "context": lambda: pw.set_auto_parallel_context(gradients_mean=True),
    "fusion": lambda: pw.set_auto_parallel_context(all_reduce_fusion_config=[1]),
    "algorithm": lambda: pw.set_algo_parameters(fully_use_devices=False),
    "profile": lambda: pw.set_auto_parallel_context(device_profile="h100"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_content_is_planned_anew(folder: Path, work: dict[str, int], change: str) -> None:
    step("mlp")
    before = work["search"]
    step("mlp", **(CHANGES[change]() or {}))
    assert work["search"] > before


def test_other_code_is_planned_anew(folder: Path, work: dict[str, int]) -> None:
    x = torch.ones(4, 4)
    for scale in (2.0, 3.0):
        f = pw.shard(lambda x, scale=scale: (x * scale).sum(), in_strategy=((2, 1),), mesh={"x": 2})
        assert f(x) == 16 * scale
    assert work["search"] == 2


def test_constants_of_a_program_are_kept(folder: Path, work: dict[str, int]) -> None:
    table = torch.arange(4.0)
    for _ in range(2):
        f = pw.shard(lambda x: (x * table).sum(), in_strategy=((2, 1),), mesh={"x": 2})
        x = torch.ones(4, 4, requires_grad=True)
        f(x).backward()
        assert torch.equal(x.grad, table.expand(4, 4))
    assert work["search"] == 1
    table += 1  # the value is no part of a plan: the call brings it
    assert f(torch.ones(4, 4)) == 40


def test_a_damaged_file_is_made_anew_with_a_warning(folder: Path, work: dict[str, int]) -> None:
    step("mlp")
    for path in folder.glob("*/*"):
        path.write_bytes(b"not ours")
    with pytest.warns(UserWarning, match=r"cannot be read \(it is not what was written there\), and is made anew"):
        step("mlp")
    assert work["search"] == 2
    step("mlp")
    assert work["search"] == 2


def test_what_has_no_form_is_made_anew_with_a_warning(
    folder: Path, work: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partway.reuse.cache.dump", lambda value, graph, kinds: dump(lambda: value, graph, kinds))
    for made in (1, 2):
        with pytest.warns(
            UserWarning, match=r"a plan has no form on disk \(a function has no form.*\), and every start"
        ):
            step("mlp")
        assert work["search"] == made


def test_a_folder_that_cannot_be_written_to_is_named_with_what_to_do(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("")
    pw.set_auto_parallel_context(compile_cache_path=str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cannot be kept in .*file.*set compile_cache_path or PARTWAY_CACHE_DIR to"):
        step("mlp")


def test_the_cache_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pw.set_auto_parallel_context(enable_compile_cache=False)
    step("mlp")
    pw.set_auto_parallel_context(enable_compile_cache=True)
    monkeypatch.setenv("PARTWAY_CACHE", "0")
    step("mlp")
    assert entries(folder) == []


def test_the_folder_is_what_the_option_or_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTWAY_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert folder_named("/c") == Path("/c")
    assert folder_named("") == Path("/a")
    monkeypatch.delenv("PARTWAY_CACHE_DIR")
    assert folder_named("") == Path("/b/partway")


def test_another_process_finds_what_this_one_made(folder: Path) -> None:
    script = textwrap.dedent(
        f"""
        import torch, partway as pw
        from partway.compiler import passes
        counts = []
        plain = passes.search
        passes.search = lambda *args: counts.append(1) or plain(*args)
        pw.set_auto_parallel_context(compile_cache_path={str(folder)!r})
        f = pw.shard(lambda x: (x * 2).sum(), in_strategy=((2, 1),), mesh={{"x": 2}})
        g = pw.shard(
            lambda x: torch.cond(x.sum() > 0, lambda x: (x * 2).sum(), lambda x: x.sin().sum(), (x,)), mesh={{"x": 2}}
        )
        x = torch.ones(4, 4, requires_grad=True)
        found = g(x)
        found.backward()
        print(float(f(torch.ones(4, 4))), float(found), float(x.grad.sum()), len(counts))
        """
    )
    said = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert said == [["32.0", "32.0", "32.0", "2"], ["32.0", "32.0", "32.0", "0"]]


def test_a_program_comes_back_from_its_bytes_with_the_ports_of_its_graph() -> None:
    case = CASES["gpt2"]
    model = case.build()
    compiled = pw.compile(model, kwargs=case.batch(), mesh={"dp": 2, "tp": 2}, in_strategy=case.batch_split("dp"))
    graph = capture(model, (), case.batch())
    found = load(dump(compiled.program, compiled.graph, (Program,)), graph, (Program,))
    assert operators_in(str(found)) == operators_in(str(compiled.program))
    assert {id(p.port) for p in found.inputs} == {id(port) for port in graph.inputs}
    for ours, theirs in zip(found.backward.graph.nodes, compiled.program.backward.graph.nodes, strict=True):
        assert str(ours.meta.get("val")) == str(theirs.meta.get("val"))
