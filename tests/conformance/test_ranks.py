"""If one rank differs, every rank reports it: see ranks.py and docs/coverage/ranks.md."""

import json
import os
import subprocess
import sys

import pytest
import ranks

pytestmark = pytest.mark.gloo

SLICE = ("later_values",)  # one that is found afterwards


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name in SLICE else pytest.param(name, marks=pytest.mark.slow) for name in ranks.CASES]
)
def test_a_rank_that_differs_is_found(name):
    # The ranks are forked, which PyTorch's backward does not survive, and other tests have run in this process.
    text = f"import json, ranks\nprint(json.dumps(ranks.examined({name!r}).problems))"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == []


def test_the_page_has_every_case():
    text = ranks.PAGE.read_text(encoding="utf-8")
    assert [case.words for case in ranks.CASES.values() if f"| {case.words} |" not in text] == []
