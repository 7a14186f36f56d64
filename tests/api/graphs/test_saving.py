"""What is saved of a call at each level, and that saving never stands in the way of training."""

from __future__ import annotations

import ast
import gc
import json
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
from graph_model import CALL, GOLDEN, MESH, Net, batch, contents, sharded, train
from torch import Tensor, fx

import partway as pw
from partway.compiler import passes
from partway.compiler.passes import PLANNING, STEP
from partway.graphs import stages, text
from partway.graphs.index import Index
from partway.propagation.plan.plan import Plan
from partway.propagation.problem.problem import SearchProblem

RANK = Path("rank_0")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Graphs are saved there, at level 2."""
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(tmp_path / "graphs"))
    return tmp_path / "graphs"


def index(folder: Path) -> Index:
    return Index.model_validate_json((folder / "index.json").read_text())


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# -- What is in the files


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another PyTorch writes other operators")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_files_of_a_small_model_are_the_golden_ones(
    saved: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", str(level))
    train()
    found, golden = contents(saved / RANK / CALL), dict[str, str]()
    for below in range(1, level + 1):
        golden |= contents(GOLDEN / str(below))
    assert sorted(found) == sorted(golden)
    for name, written in golden.items():
        assert found[name] == written, f"{name}: if this is meant, python tests/helpers/graph_model.py --write"


def test_the_files_are_the_same_in_another_process_with_other_hashes(saved: Path, tmp_path: Path) -> None:
    train()
    environment = {**os.environ, "PARTWAY_SAVE_GRAPHS_PATH": str(tmp_path / "other"), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", "import graph_model; graph_model.train()"]
    subprocess.run(command, env=environment, cwd=Path(graph_model.__file__).parent, check=True, timeout=200)
    assert contents(saved / RANK / CALL) == contents(tmp_path / "other" / RANK / CALL)


def test_the_figures_of_the_index_are_those_of_the_program_and_the_plan(saved: Path) -> None:
    model = train()
    rows = {row.name: row for row in index(saved / RANK / CALL).rows}
    program = model.program
    collectives = program.collectives
    assert rows["fuse"].wire_bytes == sum(c.wire_bytes for c in collectives)
    assert sum(rows["fuse"].collectives.values()) == len(collectives)
    graphs = [program.step.forward.graph, program.step.backward.graph]
    assert rows["fuse"].nodes == sum(node.op not in ("placeholder", "output") for g in graphs for node in g.nodes)
    assert rows["expand_operators"].nodes == len(pw.compile(Net(), batch(), mesh=MESH).graph.nodes)
    assert all(row.seconds is not None and row.seconds >= 0 for row in rows.values() if not row.file.startswith("09"))
    assert pw.Plan.load(saved / RANK / CALL / "plan.json").model_dump() == model.plan.model_dump()


def test_every_pass_is_in_the_index_and_knows_its_stage(saved: Path) -> None:
    train()
    names = [row.name for row in index(saved / RANK / CALL).rows]
    assert [each.name for each in (*PLANNING, *STEP) if each.name not in names] == []
    assert {each.makes for each in PLANNING} == set(stages.OF_PLANNING)
    assert {each.makes for each in STEP} == {"step", "program"}


def test_a_pass_that_changes_what_another_left_has_a_file_for_each(saved: Path) -> None:
    pw.set_auto_parallel_context(gradients_mean=False)
    train()
    found = [name for name in files(saved / RANK / CALL) if name.startswith("09")]
    assert found == ["09_backward.1_differentiate.txt", "09_backward.2_recompute.txt", "09_backward.txt"]
    row = next(row for row in index(saved / RANK / CALL).rows if row.name == "scale_gradients")
    assert (row.file, row.changed) == ("09_backward.txt", "+4 aten.mul.Scalar")
    assert "aten.mul.Scalar(convert_11, 2)" in (saved / RANK / CALL / "09_backward.txt").read_text()
    assert "aten.mul.Scalar(convert_11, 2)" not in (saved / RANK / CALL / found[1]).read_text()


def test_meshes_that_were_tried_and_not_taken_are_shown_apart(saved: Path) -> None:
    pw.set_auto_parallel_context(device_num=4)
    pw.compile(Net(), batch(), in_strategy=((4, 1), None))
    found = index(saved / RANK / CALL)
    tried = [row for row in found.rows if row.name == "search"]
    assert [row.kept for row in tried].count(True) == 1
    assert next(row.changed for row in tried if row.kept).startswith(f"on {found.mesh}: ")
    others = [row.file for row in found.rows if not row.kept and row.file]
    assert others
    assert all((saved / RANK / CALL / name).is_file() for name in others)
    assert "06_searched.txt" in files(saved / RANK / CALL)
    assert (saved / RANK / CALL / "index.txt").read_text().count("(not kept)") == len(
        [row for row in found.rows if not row.kept]
    )


def test_any_operator_is_written_with_its_arguments(saved: Path) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return bend(x).sum() + y.to(torch.float64).sum()

    with pytest.warns(pw.UnknownOperatorWarning):
        pw.compile(f, (torch.ones(4), torch.ones(2)), mesh={"d": 2})
    text = next((saved / RANK).glob("000_*")) / "00_captured.txt"
    assert "bend: float32[4] = partway_tests.bend.default(x)    # 16 B\n" in text.read_text()
    assert "aten._to_copy.default(y, dtype=float64)    # 16 B\n" in text.read_text()


def test_an_island_is_called_by_its_name_and_its_lines_are_shown(saved: Path) -> None:
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
    searched, lowered, fused = (
        (folder / f"{name}.txt").read_text() for name in ("06_searched", "07_lowered", "10_fused")
    )
    assert re.search(
        r"^mlp: \(float32\[4, 8\]\) = island.mlp\(\[input, 0.up, 0.down\], '[0-9a-f]{8}\.\.\.'\)", searched, re.M
    )
    strategy = '{in_strategy: (("dp", None), (None, "tp"), ("tp", None)), out_strategy: (("dp", None),)}'
    assert searched.count(strategy) == 2
    for i in range(2):
        for each in (lowered, fused):
            assert re.search(rf"^# {i}: test_saving.py:\d+, in mlp: hidden = torch.relu\(x @ up\)$", each, re.M)
    backward = fused.split("\nbackward\n")[1]
    assert re.search(r"in mlp: hidden = torch.relu\(x @ up\)\nthreshold_backward(_1)?: ", backward)


# -- Which calls have a folder


def test_each_planned_call_has_a_folder_and_others_have_none(saved: Path) -> None:
    model = train()
    model(*batch())
    model(torch.ones(8, 8), torch.zeros(8, 8))
    pw.compile(twice, (torch.ones(4),), mesh={"d": 2})
    found = sorted(path.name for path in (saved / RANK).iterdir() if path.is_dir())
    assert found == ["000_Net.forward", "001_Net.forward", "002_twice"]
    assert [row.name for row in index(saved / RANK / "002_twice").rows][-1] == "make_plan"  # there is no program yet


def test_nothing_is_saved_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARTWAY_SAVE_GRAPHS", raising=False)
    train()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_imported_unless_it_is_asked_for() -> None:
    names = "[name for name in sys.modules if name.startswith('partway.graphs.')]"
    script = f"import sys, graph_model; graph_model.train(); print({names})"
    environment = {name: value for name, value in os.environ.items() if "SAVE_GRAPHS" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=Path(graph_model.__file__).parent, check=True, timeout=200,
        capture_output=True, text=True,
    )  # fmt: skip
    assert sorted(ast.literal_eval(done.stdout)) == ["partway.graphs.asked", "partway.graphs.record"]


@pytest.mark.parametrize("level", ["1", "3"])
def test_no_graph_lives_longer_because_it_was_saved(saved: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", level)
    compiled = pw.compile(Net(), batch(), mesh=MESH, in_strategy=(("dp", None), None))
    assert "forward" in str(compiled.program)
    assert (saved / RANK / CALL / "10_fused.txt").is_file()
    found = reached_from(compiled.record)
    assert compiled.record.files in found  # type: ignore[attr-defined]
    large = fx.Node, fx.Graph, fx.GraphModule, Tensor, Plan, SearchProblem, text.Page
    assert [each for each in found if isinstance(each, large)] == []


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
    found = index(out / RANK / CALL)
    assert found.origin == "the plan was loaded from the cache: nothing was searched"
    assert [row.name for row in found.rows][-3:] == ["lower", "make_plan", "fuse"]
    assert found.rows[-1].changed == "loaded from the cache"
    assert found.rows[-1].seconds is None
    there = files(out / RANK / CALL)
    assert {"06_searched.txt", "07_lowered.txt", "10_fused.txt", "plan.json", "rank.txt"} <= set(there)
    assert not {"05_formulated.txt", "08_forward.txt", "09_backward.txt"} & set(there)
    assert "backward" in (out / RANK / CALL / "10_fused.txt").read_text()
    assert "without it" in str(model.plan.explain("up"))  # which searches, and saves nothing
    assert files(out / RANK / CALL) == there


def test_a_plan_that_was_given_is_shown_as_one(saved: Path) -> None:
    plan = train().plan
    train(parameter_plan=None, in_strategy=None, plan=plan)
    assert index(saved / RANK / "001_Net.forward").origin == (
        "search: none: the strategies are those of a plan that was given"
    )


@pytest.mark.parametrize("cached", [False, True])
def test_other_programs_of_a_call_have_folders_in_its_own(
    saved: Path, folder: Path, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached:
        monkeypatch.delenv("PARTWAY_SAVE_GRAPHS")
        train_apart()
        monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "2")
    train_apart()
    call = saved / RANK / CALL
    inner = sorted(path.name for path in call.iterdir() if path.is_dir())
    assert inner == ["accumulation-1-1"]
    backwards = [f"10_fused.{name}.txt" for name in ("early", "last", "rest")]
    assert [name for name in files(call / inner[0]) if name.startswith("10")] == backwards
    rows = [row for row in index(call).rows if row.file.startswith("accumulation-1-1/10_fused")]
    assert [row.changed == "loaded from the cache" for row in rows] == [cached] * 3
    early, last, rest = ((call / inner[0] / name).read_text() for name in backwards)
    assert "all_reduce(" not in early
    assert "return gradient of up.weight so far, on this rank, = mm_2\n" in early
    assert "gradient of up.weight so far, on this rank, addend" in last
    assert "saved " not in rest.split("so far")[1]
    assert all(" = all_reduce([" in each for each in (last, rest))


def twice(x: Tensor) -> Tensor:
    return 2 * x


def train_apart() -> None:
    """Two micro-batches."""
    model = sharded()
    with model.no_sync():
        model(*batch()).backward()
    model(*batch()).backward()


# -- Ranks


def test_rank_0_is_saved_alone_unless_all_are_asked_for(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train()
    assert [path.name for path in saved.iterdir()] == ["rank_0"]
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_PATH", f"{saved}_all")
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_RANKS", "all")
    train()
    ranks = sorted(Path(f"{saved}_all").iterdir())
    assert [path.name for path in ranks] == [f"rank_{rank}" for rank in range(4)]
    every = [contents(path / CALL) for path in ranks]
    assert every[0] | {"rank.txt": ""} == contents(saved / RANK / CALL) | {"rank.txt": ""}
    assert len({each.pop("rank.txt") for each in every}) == 4
    assert all(each == every[0] for each in every)


def test_the_file_of_a_rank_says_where_it_is_and_what_it_holds(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS_RANKS", "all")
    train()
    lines = (saved / "rank_3" / CALL / "rank.txt").read_text().splitlines()
    assert lines[0] == "rank 3 of 4 on the mesh dp=2, tp=2: dp 1, tp 1"
    assert "parameter up.weight: [8:16, 0:8] of [16, 8]" in lines
    assert "input x: [2:4, 0:8] of [4, 8]" in lines


# -- Trouble


def test_a_call_that_cannot_be_planned_has_the_graphs_so_far_and_the_error(saved: Path) -> None:
    with pytest.raises(pw.StrategyError):
        train(parameter_plan={"up.weight": ("tp", None), "u?.weight": (None, "tp")})
    found = index(saved / RANK / CALL)
    assert found.failed == "StrategyError: annotations contradict each other:"
    assert (found.rows[-1].name, found.rows[-1].kept) == ("annotate", False)
    assert found.rows[-1].changed == "on dp=2, tp=2: StrategyError: annotations contradict each other:"
    assert "03_pruned.txt" in files(saved / RANK / CALL)
    text = (saved / RANK / CALL / "index.txt").read_text()
    assert "planning failed: StrategyError: annotations contradict each other:\n" in text


def test_a_function_that_cannot_be_captured_has_an_index(saved: Path) -> None:
    def f(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(pw.CaptureError):
        pw.compile(f, (torch.ones(2),), mesh={"d": 2})
    folder = next((saved / RANK).glob("000_*"))
    assert index(folder).failed.startswith("CaptureError: ")


def test_a_variable_that_means_nothing_is_an_error_of_the_first_call(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTWAY_SAVE_GRAPHS", "5")
    with pytest.raises(pw.ContextError, match="PARTWAY_SAVE_GRAPHS is '5'; write 1 for the graphs of the main stages"):
        train()


def test_a_folder_that_cannot_be_made_is_a_warning_and_training_goes_on(saved: Path) -> None:
    saved.write_text("a file")
    with pytest.warns(UserWarning, match="graphs cannot be saved in") as caught:
        model = train()
    assert len(caught) == 1
    assert str(caught[0].message) == (
        f"graphs cannot be saved in {saved} (File exists: {saved}); planning goes on. Set PARTWAY_SAVE_GRAPHS_PATH to "
        "a folder that can be written, or unset PARTWAY_SAVE_GRAPHS"
    )
    assert model.up.weight.grad is not None


def test_a_folder_that_is_lost_on_the_way_is_one_warning(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("partway.graphs.files.write_whole", full)
    with pytest.warns(UserWarning, match=r"graphs cannot be saved .*No space left on device: somewhere") as caught:
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
    found = index(saved / RANK / CALL)
    assert found.failed == "RuntimeError: no strategy fits"
    assert [row.name for row in found.rows][-2:] == ["annotate", "formulate"]
    assert "04_annotated.on_2x2.txt" in files(saved / RANK / CALL)


def test_a_graph_that_cannot_be_shown_is_a_warning_and_the_others_are(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> text.Page:
        raise ValueError("no such form")

    monkeypatch.setattr(text, "searched", broken)
    with pytest.warns(UserWarning, match=r"graphs cannot be saved .*ValueError\('no such form'\)"):
        train()
    there = files(saved / RANK / CALL)
    assert "06_searched.txt" not in there
    assert {"05_formulated.txt", "07_lowered.txt", "10_fused.txt"} <= set(there)


def test_a_program_whose_sizes_are_not_known_is_shown_without(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise RuntimeError("no fake tensor runs this")

    monkeypatch.setattr(text, "with_values", unknown)
    train()
    lowered = (saved / RANK / CALL / "07_lowered.txt").read_text()
    assert "\nrelu_default = aten.relu.default(linear_default)\n" in lowered


def test_the_text_of_an_index_is_aligned_and_its_data_the_same(saved: Path) -> None:
    train()
    table = (saved / RANK / CALL / "index.txt").read_text().split("\n\n")[1].splitlines()
    data = json.loads((saved / RANK / CALL / "index.json").read_text())
    assert data["format"] == "partway graphs 1"
    assert len(table) == len(data["rows"]) + 1
    start = table[0].index("what changed")
    assert [line[start:].rstrip() for line in table[1:]] == [row["changed"] for row in data["rows"]]


def test_a_run_is_the_same_whether_its_graphs_are_saved(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = train()
        monkeypatch.delenv("PARTWAY_SAVE_GRAPHS")
        other = train()
    assert one.plan.model_dump() == other.plan.model_dump()
    assert str(one.program) == str(other.program)
    assert torch.equal(one.up.weight.grad, other.up.weight.grad)  # type: ignore[arg-type]
    assert passes.STEP is STEP
