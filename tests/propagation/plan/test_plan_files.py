"""Plans as files."""

import pytest

from partway.propagation.plan.data import Certificate
from partway.propagation.plan.plan import Plan
from partway.strategy import StrategyError


def test_a_plan_is_the_same_after_saving_and_loading(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert loaded.collectives == plan.collectives
    assert loaded.collectives[0].kind.communicates
    assert loaded.parameters == plan.parameters
    assert str(loaded.explain("*", alternatives=0)) == str(plan.explain("*", alternatives=0))


def test_a_plan_without_a_bound_is_saved(plan, tmp_path):
    unknown = plan.model_copy(
        update={"certificate": Certificate(mode="sharding_propagation", cost=1.0, bound=None, proven=False, width=1)}
    )
    unknown.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == unknown


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', "not json"])
def test_a_file_that_holds_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(StrategyError, match="holds no plan of this version"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StrategyError, match=r"could not read a plan from .*No such file"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_of_the_version_before_is_read(plan, of_the_version_before):
    assert not of_the_version_before.has_producers
    assert str(of_the_version_before) == str(plan)
    assert of_the_version_before.parameters == plan.parameters
