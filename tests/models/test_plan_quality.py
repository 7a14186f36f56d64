"""The benchmark of plans beside the peers': its models, what it counts, and its key claims where they are quick."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peer_models
import plan_quality
import pytest
import torch
import typer
from checks import assert_same_gradients, assert_same_loss, gradients
from plan_quality import CASES, GRID, MEGATRON, MODELS, Case, Figures, Model, Peer, alone, bar, figures, misses, suites
from program_figures import ATTENTION, Attention, flops, memory, wire
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

import partway as pw
from partway.measure.workloads import ResNet50

ROWS = {name: peers for suite in suites() for name, peers in suite.rows.items()}
MLP_CASES = [case for case in CASES if case.name.startswith("mlp")]
PEER = Peer("peer", 100.0, 10.0, None, None, False)
FOUND = Figures(
    claimed=100.0, listed=100.0, wire=100.0, flops=10, even=10.0, parameters=0, gradients=0, peak=0, temporary=0,
    predicted=0.0, certificate="", proven=True, seconds=0.0, largest=(),
)  # fmt: skip


# -- the rows and the models


def test_every_row_of_the_peers_is_a_case() -> None:
    assert sorted(case.name for case in CASES) == sorted(ROWS)
    assert {case.model for case in CASES} == set(MODELS)


def test_mindspores_units_are_those_of_its_data_parallel_mlp() -> None:
    """A ring AllReduce of all its gradients over 8 devices."""
    semi = next(peer for peer in ROWS["mlp 256, none"] if peer.by == "semi")
    assert semi.wire == pytest.approx(1.75 * 4 * 25_175_040, rel=0.001)


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (peer_models.MLP, 25_175_040),
        (peer_models.GPT, 67_379_712),
        (lambda: peer_models.GPT(fused=True), 67_379_712),
        (lambda: peer_models.Encoder(1), 12_596_224),
        (lambda: peer_models.Encoder(1, 4096), 201_379_840),
        (ResNet50, 25_557_032),
    ],
)
def test_models_have_the_parameters_that_the_peers_figures_are_of(build: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build().parameters()) == count


SMALL = {
    "mlp": Model(lambda first: peer_models.MLP((8, 16, 16, 8), first), lambda: _pair(8, 8)),
    "gpt": Model(lambda _: peer_models.GPT(layers=2, width=16, heads=4, sequence=8, vocabulary=64), lambda: _ids(4)),
    "gpt fused": Model(
        lambda _: peer_models.GPT(layers=1, width=16, heads=4, sequence=8, vocabulary=64, fused=True), lambda: _ids(4)
    ),
    "enc": Model(lambda first: peer_models.Encoder(2, 16, 4, first), lambda: _pair(8, 4, 16)),
}


def _pair(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(shape), "target": torch.randn(shape)}


def _ids(batch: int) -> dict[str, Tensor]:
    return {name: torch.randint(64, (batch, 8)) for name in ("ids", "target")}


def flop_counter() -> FlopCounterMode:
    """PyTorch's own count of what runs, taught the attention that it does not know."""

    def counts(formula: Attention) -> Callable[..., int]:
        return lambda *shapes, **_: formula.count(shapes)

    known = {operator.overloadpacket: counts(formula) for operator, formula in ATTENTION.items()}
    return FlopCounterMode(display=False, custom_mapping=known)


@pytest.mark.parametrize(
    "case",
    [
        Case("column", "mlp", {"tp": 8}, None, {"w1.weight": ("tp", None)}),
        Case("a1", "mlp", None, 8, operator=((2, 1), (4, 1))),
        Case("a1", "enc", None, 8, operator=((2, 1, 1), (4, 1))),
        Case("megatron", "gpt", GRID, "dp", {f"blocks.*.{name}": at for name, at in MEGATRON.items()}),
        Case("megatron", "gpt fused", GRID, "dp", {"blocks.*.qkv.weight": ("tp", None)}),
    ],
    ids=lambda case: f"{case.model} {case.name}",
)  # fmt: skip
def test_models_run_split_as_the_cases_say_and_cost_what_is_counted(case: Case) -> None:
    model = SMALL[case.model]
    torch.manual_seed(1)
    plain, batch = model.build(torch.nn.functional.linear).double(), model.batch()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    module = model.build(plan_quality.linear_of(case)).double()
    module.load_state_dict(plain.state_dict())
    with pw.auto_parallel_context(device_num=8):
        pw.shard(module, **plan_quality.arguments(case, batch))
        gradients(module, batch)  # planning runs the program on fake tensors, which would count
        with pw.record_collectives() as events, flop_counter() as counter:
            loss, found = gradients(module, batch)
    expected_loss, expected = gradients(plain, batch)
    assert_same_loss(loss, expected_loss, 1e-10)
    assert_same_gradients(found, expected, 1e-10)
    program: Any = module.program
    assert wire(program) == pytest.approx(sum(event.wire_bytes for event in events))
    assert 8 * flops(program) == counter.get_total_flops()


def test_resnet_runs_on_real_images() -> None:
    model = ResNet50(width=4, classes=8)
    loss = model(torch.randn(2, 3, 64, 64), torch.tensor([1, 7]))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())


# -- the claims


@pytest.mark.parametrize("case", MLP_CASES, ids=lambda case: case.name)
def test_plans_of_the_mlp_send_no_more_than_the_best_peer_and_share_the_work(case: Case) -> None:
    model = MODELS[case.model]
    found = figures(case, model, alone(model))
    assert misses(found, bar(ROWS[case.name], found.even)) == ()
    assert found.proven
    assert found.wire == pytest.approx(found.claimed)
    assert found.wire == pytest.approx(found.listed)
    assert found.flops == pytest.approx(found.even)


# -- the counts


def _product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sum()


def _compiled(parts: int) -> pw.Compiled:
    """The product of x[65536,64] and w[64,128] on one device, or with its batch split."""
    with torch.device("meta"):
        given = torch.empty(65536, 64), torch.empty(64, 128, requires_grad=True)
    return pw.compile(_product, given, mesh={"dp": parts}, in_strategy=(("dp", None), None) if parts > 1 else None)


@pytest.mark.parametrize("parts", [1, 8])
def test_flops_are_those_of_the_local_products(parts: int) -> None:
    """A product forward and one backward (the input needs no gradient), each 2 m k n."""
    assert flops(_compiled(parts).program) == 2 * (2 * 65536 * 64 * 128) // parts


def test_wire_is_priced_from_the_graphs() -> None:
    """Data parallel: an all_reduce of the weight's gradient and one of the loss."""
    assert wire(_compiled(8).program) == 2 * 7 / 8 * (64 * 128 * 4 + 4)


def test_memory_is_counted_from_the_graphs() -> None:
    held = memory(_compiled(1).program)
    batch, weight, hidden, scalar = 4 * 65536 * 64, 4 * 64 * 128, 4 * 65536 * 128, 4
    assert held.rest == batch + weight + scalar  # with the gradient of the loss, which the caller gives
    # The most lives when tanh's gradient is made of its result and stands beside it and the loss; what went into
    # tanh is gone, and so is the result once the weight's gradient is made.
    assert held.peak - held.rest == held.beyond_rest == scalar + 2 * hidden


def test_an_attention_operator_without_a_formula_is_named() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    graph.call_function(torch.ops.aten._scaled_dot_product_attention_math.default, (q, q, q), name="scores")
    program: Any = SimpleNamespace(forward=fx.GraphModule({}, graph), backward=None)
    with pytest.raises(ValueError, match=r"no formula for the FLOPs of aten._scaled_dot_product_attention_math.default "
                                         r"\(node scores\); add it to ATTENTION"):  # fmt: skip
        flops(program)


# -- the verdict


def test_the_bar_is_the_least_of_those_that_share_the_work() -> None:
    greedy, fair, silent = replace(PEER, wire=1.0, flops=20.0), PEER, replace(PEER, wire=200.0, flops=None)
    assert bar((greedy, fair, silent), 10.0) is fair
    assert bar((greedy, silent), 10.0) is silent
    assert bar((greedy,), 10.0) is greedy
    must = replace(greedy, must=True)
    assert bar((must, fair), 10.0) is must


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ()),
        ({"claimed": 101.0, "listed": 101.0, "wire": 101.0}, ("wire",)),
        ({"flops": 11}, ("flops",)),
        ({"claimed": 99.0}, ("claim",)),
        ({"listed": 99.0}, ("claim",)),
    ],
)
def test_a_row_misses_for_what_is_worse(changed: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert misses(replace(FOUND, **changed), PEER) == expected


def test_a_row_that_is_not_there_is_an_error() -> None:
    with pytest.raises(typer.BadParameter, match="no row contains 'gtp'; the rows are: mlp, batch split 8; mlp, only"):
        plan_quality.main("gtp", Path("unused"))


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_:
        plan_quality.main("mlp 256, a1", tmp_path / "out" / "quality.json")
    assert exit_.value.exit_code == 0
    (row,) = json.loads((tmp_path / "out" / "quality.json").read_text())["rows"]
    assert (row["suite"], row["case"], row["misses"]) == ("B", "mlp 256, a1", [])
    assert "1 of 1 rows hold" in capsys.readouterr().out


def test_a_row_that_fails_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_quality, "bar", lambda peers, even: replace(PEER, wire=1.0))
    with pytest.raises(typer.Exit) as exit_:
        plan_quality.main("mlp 256, a1", tmp_path / "quality.json")
    assert exit_.value.exit_code == 1
    shown = capsys.readouterr().out
    assert "mlp 256, a1 misses wire; what sends most:" in shown
    assert "MB forward" in shown
