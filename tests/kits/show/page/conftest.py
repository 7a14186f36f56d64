"""What the tests of pages share."""

import pytest
from perceptron import of_the_version_before, plan

from partway.propagation.plan.data import PlanData

__all__ = ["of_the_version_before", "plan"]


@pytest.fixture(scope="session")
def plan_data(plan) -> PlanData:
    return plan


@pytest.fixture
def page_of(tmp_path):
    """A function that gives the text of a plan's page."""

    def page(plan, **options) -> str:
        plan.save_html(tmp_path / "plan.html", **options)
        return (tmp_path / "plan.html").read_text(encoding="utf-8")

    return page
