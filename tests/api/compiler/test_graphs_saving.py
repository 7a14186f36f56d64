"""What is saved of a call at each level, and that saving never stands in the way of training."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import FunctionType, ModuleType

import graph_model
import pytest
import torch
from bend import bend
from graph_model import CALL, MESH, Net, batch, contents, sharded, train
from torch import Tensor, fx

import partway as pw
from partway.compiler import graphs_record as record
from partway.compiler import passes
from partway.compiler.passes import PLANNING, PROGRAM
from partway.propagation.plan.plan import Plan
from partway.propagation.problem.problem import SearchProblem
from partway.runtime.launching.job import JOB

RANK = Path("rank_0")


@pytest.fixture(autouse=True)
def new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is there from an earlier run."""
    monkeypatch.setattr(JOB, "folders", {})


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Graphs are saved there, at level 2."""
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path / "graphs"))
    return tmp_path / "graphs"


def passes_of(folder: Path) -> list[str]:
    """The passes of which there are files, in order."""
    return [name.partition("_")[2] for name in sorted(contents(folder)) if re.match(r"\d+_.*\.txt", name)]


def text(folder: Path, name: str) -> str:
    """The file of a pass."""
    (path,) = folder.glob(f"[0-9]*_{name}.txt")
    return path.read_text(encoding="utf-8")


def rows(folder: Path) -> dict[str, str]:
    """What the index says of each pass."""
    _, *lines = (folder / "index.txt").read_text(encoding="utf-8").splitlines()
    found = (re.split(r" {2,}", line, maxsplit=1) for line in lines)
    return {name.partition("_")[2].removesuffix(".txt"): said for name, said in found}


# -- What is in the files


@pytest.mark.parametrize("level", ["1", "2"])
def test_a_pass_has_a_file_with_what_str_says_of_its_value(
    saved: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", level)
    model = train()
    folder = saved / RANK / CALL
    main = ["trace.txt", "prune.txt", "lower.txt", "make_plan.txt", "fuse.txt"]
    if level == "1":
        assert passes_of(folder) == main
    else:
        every = [
            "trace", "expand_operators", "prune", "annotate", "formulate", "search", "lower", "make_plan",
            "differentiate", "recompute", "fuse",
        ]  # fmt: skip
        assert passes_of(folder) == [f"{name}.txt" for name in every]
    compiled = pw.compile(Net().train(), batch(), mesh=MESH, in_strategy=(("dp", None), ("dp", None)))
    assert text(folder, "fuse") == f"{model.program}\n"
    assert text(folder, "prune").startswith("parameter up.weight: float32[16, 8]    # 512 B\n")
    assert text(saved / RANK / "001_Net.forward", "lower") == f"{compiled.local}\n"
    assert pw.Plan.load(folder / "plan.json").model_dump() == model.plan.model_dump()


def test_the_plan_is_shown_with_strategies_layouts_and_collectives(saved: Path) -> None:
    model = train()
    plan = text(saved / RANK / CALL, "make_plan")
    assert "\nmesh dp=2, tp=2\n" in plan
    assert "\nparameter up.weight: float32[16, 8] [dp:R tp:S0]    # annotated ('tp', None)\n" in plan
    assert re.search(
        r"\n# down: graph_model.py:\d+, in forward: return F.mse_loss\(self.down\(hidden\), y\)\n"
        r"linear_1: float32\[4, 8\] = aten.linear.default\(mul_scalar, down.weight, down.bias\)\n"
        r"    # splits dp:_1 tp:k: \[dp:S0 tp:S1\], \[dp:B tp:S1\], \[dp:B tp:P\] -> \[dp:S0 tp:P\]; .*s\n"
        r"    # backward all_reduce over dp of down.weight: 2 ranks send 256 B each, .*s\n",
        plan,
    )
    assert len(re.findall(r"^    # (?:for|back)ward ", plan, re.MULTILINE)) == len(model.plan.collectives)


def test_the_strategies_that_were_to_be_had_are_shown_the_cheapest_first(saved: Path) -> None:
    train()
    problem = text(saved / RANK / CALL, "formulate")
    assert "\ninput up.weight: 1 strategy, annotated ('tp', None)\n" in problem
    assert re.search(
        r"\noperator linear: 9 strategies\n(    splits .* -> \[dp:\S+ tp:\S+\]    # .*\n){6}    and 3 more", problem
    )
    annotated = text(saved / RANK / CALL, "annotate")
    assert "\ndown.weight: (None, 'tp'), from parameter_plan['down.weight']: [dp:R tp:S1]\n" in annotated


def test_the_index_says_what_each_pass_changed(saved: Path) -> None:
    train()
    found = rows(saved / RANK / CALL)
    assert [each.name for each in (*PLANNING, *PROGRAM) if each.name not in found] == []
    assert found["trace"] == "9 operators"
    assert found["expand_operators"].startswith("10 operators: -2 getitem, -1 aten.native_dropout.default, ")
    assert found["prune"] == found["scale_gradients"] == "nothing changed"
    assert found["formulate"] == "on dp=2, tp=2: 15 choices to make, of 138 strategies"
    assert found["make_plan"].startswith("on dp=2, tp=2: a step is predicted to take ")
    assert found["fuse"].endswith(" operators: -3 all_reduce, +4 getitem")


def test_the_files_are_the_same_in_another_process_with_other_hashes(saved: Path, tmp_path: Path) -> None:
    train()
    environment = {**os.environ, "PARTWAY_SAVE_GRAPHS_PATH": str(tmp_path / "other"), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", "import graph_model; graph_model.train()"]
    subprocess.run(command, env=environment, cwd=Path(graph_model.__file__).parent, check=True, timeout=200)
    assert contents(saved / RANK / CALL) == contents(tmp_path / "other" / RANK / CALL)


def test_a_pass_that_changes_what_another_left_has_a_file_too(saved: Path) -> None:
    pw.set_auto_parallel_context(gradients_mean=False)
    train()
    folder = saved / RANK / CALL
    assert rows(folder)["scale_gradients"].endswith(" operators: +4 aten.mul.Scalar")
    assert "aten.mul.Scalar(convert_11, 2)" in text(folder, "scale_gradients")
    assert "aten.mul.Scalar(convert_11, 2)" not in text(folder, "recompute")


def test_every_mesh_that_was_tried_is_shown(saved: Path) -> None:
    pw.set_auto_parallel_context(device_num=4)
    compiled = pw.compile(Net(), batch(), in_strategy=((4, 1), None))
    folder = saved / RANK / CALL
    index = (folder / "index.txt").read_text()
    tried = re.findall(r"_search\.txt +on (.*): the cheapest plan costs", index)
    assert len(tried) > 1
    assert len(list(folder.glob("*_formulate.txt"))) >= len(tried)
    assert re.findall(r"_make_plan\.txt +on (.*): a step", index) == [str(compiled.mesh)]


def test_any_operator_is_written_with_its_arguments(saved: Path) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return bend(x).sum() + y.to(torch.float64).sum()

    with pytest.warns(pw.UnknownOperatorWarning):
        pw.compile(f, (torch.ones(4), torch.ones(2)), mesh={"d": 2})
    written = text(next((saved / RANK).glob("000_*")), "trace")
    assert "bend: float32[4] = partway_tests.bend.default(x)    # 16 B\n" in written
    assert "aten._to_copy.default(y, dtype=float64)    # 16 B\n" in written


def test_a_manual_function_is_called_by_its_name_and_its_lines_are_shown(saved: Path) -> None:
    @pw.manual(in_strategy=(("dp", None), (None, "tp"), ("tp", None)), out_strategy=(("dp", None),), mesh=MESH)
    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.relu(x @ up)
        return pw.ops.all_reduce(hidden @ down, group="tp")

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Parameter(torch.ones(8, 16)), torch.nn.Parameter(torch.ones(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return mlp(x, self.up, self.down).tanh()

    model = pw.shard(torch.nn.Sequential(Block(), Block()), mesh=MESH, in_strategy=(("dp", None),))
    model(torch.ones(4, 8)).sum().backward()
    folder = saved / RANK / "000_Sequential.forward"
    pruned, lowered, fused = (text(folder, name) for name in ("prune", "lower", "fuse"))
    assert re.search(
        r"^mlp: \(float32\[4, 8\]\) = manual.mlp\(\[input, 0.up, 0.down\], '[0-9a-f]{8}\.\.\.'\)", pruned, re.MULTILINE
    )
    for i in range(2):
        for each in (lowered, fused):
            line = rf"^# {i}: test_graphs_saving.py:\d+, in mlp: hidden = torch.relu\(x @ up\)$"
            assert re.search(line, each, re.MULTILINE)
    assert re.search(
        r"in mlp: hidden = torch.relu\(x @ up\)\nthreshold_backward(_1)?: ", fused.split("\nbackward\n")[1]
    )


# -- Which calls have a folder


def test_each_planned_call_has_a_folder_and_others_have_none(saved: Path) -> None:
    model = train()
    model(*batch())
    model(torch.ones(8, 8), torch.zeros(8, 8))
    pw.compile(twice, (torch.ones(4),), mesh={"d": 2})
    found = sorted(path.name for path in (saved / RANK).iterdir())
    assert found == ["000_Net.forward", "001_Net.forward", "002_twice"]
    assert list(rows(saved / RANK / "002_twice"))[-1] == "make_plan"  # there is no program yet


def test_a_name_is_one_that_files_can_have(saved: Path) -> None:
    def outer(x: Tensor) -> Tensor:
        return x + 1

    outer.__qualname__ = f"outer.<locals>.f/../{'x y' * 100}"
    pw.compile(outer, (torch.ones(4),), mesh={"d": 2})
    (folder,) = (saved / RANK).iterdir()
    assert folder.name.startswith("000_")
    assert re.fullmatch(r"[\w.-]{5,84}", folder.name)


def test_nothing_is_saved_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARTWAY_SAVE_GRAPHS", raising=False)
    train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", ["1", "2"])
def test_no_graph_lives_longer_because_it_was_saved(saved: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", level)
    compiled = pw.compile(Net(), batch(), mesh=MESH, in_strategy=(("dp", None), None))
    assert "forward" in str(compiled.program)
    assert "fuse.txt" in passes_of(saved / RANK / CALL)
    large = fx.Node, fx.Graph, fx.GraphModule, Tensor, Plan, SearchProblem
    assert [each for each in reached_from(compiled.record) if isinstance(each, large)] == []


def reached_from(root: object) -> list[object]:
    """What an object keeps alive, but for modules, classes and what functions see as their globals."""
    found, ahead = {id(root): root}, [root]
    while ahead:
        for each in gc.get_referents(ahead.pop()):
            if isinstance(each, FunctionType):
                inside = list(each.__closure__ or ())
            else:
                inside = [] if isinstance(each, type | ModuleType) else [each]
            for one in inside:
                if id(one) not in found:
                    found[id(one)] = one
                    ahead.append(one)
    return list(found.values())


def test_what_was_loaded_is_shown_and_the_index_says_so(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    out = tmp_path_factory.mktemp("graphs")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(out))
    model = train()
    found = rows(out / RANK / CALL)
    assert list(found)[-3:] == ["lower", "make_plan", "fuse"]
    assert all(found[name].startswith("loaded from the cache: ") for name in list(found)[-3:])
    assert not {"formulate.txt", "differentiate.txt"} & set(passes_of(out / RANK / CALL))
    assert text(out / RANK / CALL, "fuse") == f"{model.program}\n"
    before = contents(out)
    assert "without it" in str(model.plan.explain("up"))  # which searches, and saves nothing
    assert contents(out) == before


@pytest.mark.parametrize("cached", [False, True])
def test_other_programs_of_a_call_are_shown_with_their_name(
    saved: Path, folder: Path, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached:
        monkeypatch.delenv("PARTWAY_SAVE_GRAPHS")
        train_apart()
        monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    train_apart()
    call = saved / RANK / CALL
    assert rows(call)["accumulation-1-1.fuse"].startswith("loaded from the cache: ") is cached
    early, last, rest = re.split(r"\n\n(?:last|rest)\n", text(call, "accumulation-1-1.fuse"))
    assert "all_reduce(" not in early
    assert "return gradient of up.weight = mm_2\n" in early
    assert all(" = all_reduce([" in each for each in (last, rest))
    assert "saved " not in rest


def twice(x: Tensor) -> Tensor:
    return 2 * x


def train_apart() -> None:
    """Two micro-batches."""
    model = sharded()
    with model.no_sync():
        model(*batch()).backward()
    model(*batch()).backward()


# -- Nothing is written over


def test_a_run_whose_folder_is_taken_has_one_beside_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / RANK).mkdir(parents=True)
    (saved / RANK / "mine.txt").write_text("mine")
    for _ in range(2):
        monkeypatch.setattr(JOB, "folders", {})  # another process
        pw.compile(twice, (torch.ones(4),), mesh={"d": 2})
    assert sorted(path.name for path in saved.iterdir()) == ["rank_0", "rank_0.1", "rank_0.2"]
    assert contents(saved / RANK) == {"mine.txt": "mine"}
    assert contents(saved / "rank_0.1") == contents(saved / "rank_0.2") != {}


def test_a_link_is_not_followed(saved: Path, tmp_path: Path) -> None:
    saved.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (saved / RANK).symlink_to(tmp_path / "elsewhere")
    pw.compile(twice, (torch.ones(4),), mesh={"d": 2})
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (saved / "rank_0.1" / "000_twice" / "index.txt").is_file()


def test_a_file_that_somebody_put_there_is_not_written_over(saved: Path) -> None:
    compiled = pw.compile(Net(), batch(), mesh=MESH)
    last = max(int(name[:3]) for name in contents(saved / RANK / CALL) if name[:3].isdigit())
    (saved / RANK / CALL / f"{last + 1:03d}_differentiate.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"graphs cannot be saved .*File exists"):
        assert "forward" in str(compiled.program)
    assert text(saved / RANK / CALL, "differentiate") == "mine"


# -- Trouble


def test_a_call_that_cannot_be_planned_has_the_graphs_so_far_and_the_error(saved: Path) -> None:
    with pytest.raises(pw.StrategyError):
        train(parameter_plan={"up.weight": ("tp", None), "u?.weight": (None, "tp")})
    found = rows(saved / RANK / CALL)
    assert found["annotate"] == "on dp=2, tp=2: StrategyError: annotations contradict each other:"
    assert found["error"] == "StrategyError: annotations contradict each other:"
    assert "prune.txt" in passes_of(saved / RANK / CALL)
    assert "up.weight" in text(saved / RANK / CALL, "error")


def test_a_function_that_cannot_be_captured_has_an_index(saved: Path) -> None:
    def f(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(pw.CaptureError):
        pw.compile(f, (torch.ones(2),), mesh={"d": 2})
    assert rows(next((saved / RANK).glob("000_*")))["error"].startswith("CaptureError: ")


def test_a_variable_that_means_nothing_is_an_error_of_the_first_call(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "3")
    with pytest.raises(pw.ContextError, match="PARTWAY_SAVE_GRAPHS is '3'; write 1 for the graphs of the main stages"):
        train()


def test_a_folder_that_cannot_be_made_is_a_warning_and_training_goes_on(saved: Path) -> None:
    saved.write_text("a file")
    with pytest.warns(UserWarning, match="graphs cannot be saved in") as caught:
        model = train()
    assert len(caught) == 1
    assert str(caught[0].message) == (
        f"graphs cannot be saved in {saved} (File exists); planning goes on. Set PARTWAY_SAVE_GRAPHS_PATH to a folder "
        "that can be written, or unset PARTWAY_SAVE_GRAPHS"
    )
    assert model.up.weight.grad is not None


def test_a_disk_that_is_full_is_one_warning(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.Record, "_changed", full)
    with pytest.warns(UserWarning, match=r"graphs cannot be saved .*No space left on device") as caught:
        model = train()
    assert len(caught) == 1
    assert model.up.weight.grad is not None


def test_a_folder_that_is_removed_between_two_steps_is_a_warning_and_a_new_call_has_one(saved: Path) -> None:
    compiled = pw.compile(Net(), batch(), mesh=MESH)
    shutil.rmtree(saved)
    with pytest.warns(UserWarning, match=r"graphs cannot be saved .*No such file or directory") as caught:
        assert "forward" in str(compiled.program)
    assert len(caught) == 1
    pw.compile(Net(), batch(), mesh=MESH)
    assert (saved / RANK / CALL / "index.txt").is_file()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_may_not_be_written_is_a_warning(saved: Path) -> None:
    saved.mkdir(mode=0o555)
    with pytest.warns(UserWarning, match=r"graphs cannot be saved .*Permission denied"):
        model = train()
    assert model.up.weight.grad is not None


def test_an_error_within_a_pass_is_the_error_and_the_index_has_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no strategy fits\nsecond line")

    monkeypatch.setattr("partway.compiler.passes.formulate", broken)
    with pytest.raises(RuntimeError, match="no strategy fits"):
        train()
    assert list(rows(saved / RANK / CALL))[-3:] == ["annotate", "formulate", "error"]
    assert text(saved / RANK / CALL, "error") == "RuntimeError: no strategy fits\nsecond line\n"


def test_a_value_that_cannot_be_shown_is_a_warning_and_the_others_are(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> str:
        raise ValueError("no such form")

    monkeypatch.setattr(SearchProblem, "__str__", broken)
    with pytest.warns(UserWarning, match=r"graphs cannot be saved .*ValueError\('no such form'\)"):
        train()
    there = passes_of(saved / RANK / CALL)
    assert "formulate.txt" not in there
    assert {"annotate.txt", "make_plan.txt", "fuse.txt"} <= set(there)


def test_a_run_is_the_same_whether_its_graphs_are_saved(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = train()
        monkeypatch.delenv("PARTWAY_SAVE_GRAPHS")
        other = train()
    assert one.plan.model_dump() == other.plan.model_dump()
    assert str(one.program) == str(other.program)
    assert torch.equal(one.up.weight.grad, other.up.weight.grad)  # type: ignore[arg-type]
    assert passes.PROGRAM is PROGRAM
