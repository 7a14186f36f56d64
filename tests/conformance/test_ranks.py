"""Where one rank differs every rank says so: see ranks.py, and docs/coverage/ranks.md."""

import pytest
import ranks

pytestmark = pytest.mark.gloo

SLICE = "annotation", "later_values"  # one that is found before, and one that is found afterwards


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name in SLICE else pytest.param(name, marks=pytest.mark.slow) for name in ranks.CASES]
)
def test_a_rank_that_differs_is_found(name, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ranks.quick():
        assert ranks.examined(name).problems == []


def test_the_page_has_every_case():
    text = ranks.PAGE.read_text(encoding="utf-8")
    assert [words for words, _ in ranks.CASES.values() if f"| {words} |" not in text] == []
