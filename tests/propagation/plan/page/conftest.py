"""What the tests of pages share."""

import pytest

from partway.propagation.plan.data import PlanData


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
