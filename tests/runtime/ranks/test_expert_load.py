"""The rows that each expert gets are counted on all devices, once, and too many are warned of."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partway as pw
from partway.propagation.program import differentiate

TOKENS, EXPERTS, FEATURES, HIDDEN, K, STEPS = 128, 16, 16, 64, 2, 2


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, FEATURES, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FEATURES) / 6)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
        made = pw.ops.grouped_matmul(pw.ops.grouped_matmul(rows, self.up, ends).relu(), self.down, ends)
        return pw.ops.combine(made, where, weights)


class Two(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.first, self.second, self.again = Mixture(), Mixture(), again

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
        return x + self.second(x)


def counted(axes, how, again):
    torch.manual_seed(0)
    model, x = Two(again).double(), torch.randn(TOKENS, FEATURES, dtype=torch.float64)
    with torch.no_grad():
        ids = [model.first.gate(x).topk(K, -1).indices, model.second.gate(model.first(x)).topk(K, -1).indices]
    expected = [tuple((STEPS * torch.bincount(each.flatten(), minlength=EXPERTS)).tolist()) for each in ids]
    pw.set_algo_parameters(fully_use_devices=False, recompute="all" if again else "auto")
    experts = {"first.up": how, "first.down": how, "second.up": how, "second.down": how}
    sharded = pw.shard(model, (("dp", None),), mesh=axes, parameter_plan=experts)
    with pw.record_expert_load() as loads:
        for _ in range(STEPS):
            sharded(x).square().mean().backward()
    sharded(x)
    assert [load.layer.rpartition(".")[0] for load in loads] == ["first", "second"]
    assert [load.by_expert for load in loads] == expected
    for load in loads:
        parts = axes["ep"] if how is not None else len(load.by_device)  # the search may cut them
        by_device = torch.tensor(load.by_expert).view(parts, -1).sum(1)
        assert load.by_device == tuple(by_device.tolist())
        assert load.busiest == float(by_device.max()) * parts / sum(load.by_expert)
        assert str(load) == (
            f"{load.layer}: {' '.join(map(str, load.by_expert))} rows by expert, "
            f"{' '.join(map(str, load.by_device))} by device ({load.busiest:.2f})"
        )


WAYS = {"experts split": ("ep", None, None), "whole at rest": None}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_rows_are_counted_once_on_simulated_ranks(how, again):
    counted({"dp": 2, "ep": 2}, how, again)


@pytest.mark.gloo
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_rows_are_counted_once_on_processes(on_ranks, how):
    on_ranks(4, counted, {"dp": 2, "ep": 2}, how, True)


def to_one(load):
    """A step in which all tokens choose experts 8 and 9 of 16, which lie on the third of four devices."""
    pw.set_algo_parameters(expert_load=load)
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(TOKENS, FEATURES).abs()
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.weight[8:10] = 1.0
    split = ("ep", None, None)
    sharded = pw.shard(model, (("ep", None),), mesh={"ep": 4}, parameter_plan={"up": split, "down": split})
    return sharded, x


def test_more_rows_than_the_load_allows_are_warned_of_and_computed():
    expected = to_one(None)[0](to_one(None)[1])
    sharded, x = to_one(1.5)
    with pytest.warns(pw.ExpertLoadWarning) as said:
        torch.testing.assert_close(sharded(x), expected, rtol=1e-5, atol=1e-5)
    assert [str(each.message) for each in said] == [
        "dispatch: the ranks with experts 8 to 11 got more rows than expert_load allows, most of them for expert 8; "
        "the step goes on, with more memory than planned (pw.record_expert_load says how many)"
    ]


@pytest.mark.parametrize("load", [None, 4.0])
def test_rows_that_are_allowed_are_not_warned_of(load):
    sharded, x = to_one(load)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(x)


def test_a_recorder_hears_nothing_after_its_block():
    sharded, x = to_one(None)
    with pw.record_expert_load() as none:
        pass
    with pytest.raises(pw.CaptureError), pw.record_expert_load() as failed:
        sharded(x[:, 1:])
    with pw.record_expert_load() as loads:
        sharded(x)
    assert (none, failed) == ([], [])
    assert loads[0].by_device == (0, 0, TOKENS * K, 0)
    assert loads[0].busiest == 4.0


class Deep(nn.Module):
    """Equal layers, which are differentiated once."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_equal_layers_are_traced_once_and_each_is_named(monkeypatch):
    traced, original = [], differentiate._derivative
    monkeypatch.setattr(differentiate, "_derivative", lambda *given: traced.append(given[0]) or original(*given))
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(TOKENS, FEATURES)
    split = {name: ("ep", None, None) for name, _ in model.named_parameters() if name.endswith(("up", "down"))}
    sharded = pw.shard(model, (("ep", None),), mesh={"ep": 4}, parameter_plan=split)
    with pw.record_expert_load() as loads:
        sharded(x).backward()
    assert [load.layer.rpartition(".")[0] for load in loads] == [f"layers.{i}" for i in range(6)]
    calls = sum(node.op == "call_function" for node in sharded.program.forward.graph.nodes)
    both = 2 * calls  # the program is traced for two numbers of rows
    assert 0 < sum(len(piece.nodes) for piece in traced) < 0.75 * both
