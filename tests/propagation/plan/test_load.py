"""The load of mixtures beside their plan, and loads of other models."""

import pytest
import torch
from torch import nn

import partway as pw
from partway.propagation.plan.load import ExpertLoad, loads_of
from partway.strategy import StrategyError

EXPERTS, FEATURES = 8, 16


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        rows, ends, where = pw.ops.dispatch(x, ids, EXPERTS)
        return pw.ops.combine(pw.ops.grouped_matmul(rows, self.up, ends), where, weights)


@pytest.fixture
def plan_and_loads():
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), Mixture())
    sharded = pw.shard(model, (("x", None),), mesh={"x": 2})
    with pw.record_expert_load() as loads:
        sharded(torch.randn(32, FEATURES))
    return sharded.plan, loads


def test_a_mixture_is_explained_with_its_rows(plan_and_loads):
    plan, loads = plan_and_loads
    (load,) = loads
    text = str(plan.explain("dispatch", alternatives=0, loads=loads))
    assert f"    {load.rows} in the recorded steps\n" in text + "\n"
    assert load.rows.startswith(" ".join(map(str, load.by_expert)) + " rows by expert, ")
    assert "recorded steps" not in str(plan.explain("dispatch", alternatives=0))
    assert "recorded steps" not in str(plan.explain("combine", alternatives=0, loads=loads))


def test_loads_of_other_models_are_refused(plan_and_loads):
    plan, _ = plan_and_loads
    with pytest.raises(StrategyError, match=r"rows of '2\.dispatch', which is no mixture of this plan; did you mean"):
        loads_of(plan, [ExpertLoad("2.dispatch", (1,), (1,))])
    with pytest.raises(StrategyError, match="loads has 3; give what record_expert_load yields, a list of ExpertLoad"):
        plan.explain("dispatch", loads=[3])
    dense = pw.shard(nn.Linear(4, 4), (("x", None),), mesh={"x": 2})
    dense(torch.randn(4, 4))
    with pytest.raises(StrategyError, match="which is no mixture of this plan; it has none"):
        loads_of(dense.plan, [ExpertLoad("dispatch", (1,), (1,))])


def test_the_page_shows_each_mixture_once(plan_and_loads, tmp_path):
    plan, loads = plan_and_loads
    plan.save_html(tmp_path / "plan.html", alternatives=0, loads=loads)
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.count("Load of experts") == 2  # the title, and the link to it
    assert f"expert 3: {loads[0].by_expert[3]:,} rows" in text
    plan.save_html(tmp_path / "plan.html", alternatives=0)
    assert "Load of experts" not in (tmp_path / "plan.html").read_text(encoding="utf-8")
