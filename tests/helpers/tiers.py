"""Which tests `make test` runs: those that take up to about a second, and some longer ones without which it would miss
a class of faults.

`long.txt` lists the others, which `make test-long` runs. To write it, run both with reports of the tests' times:

    make test-long ARGS="--junitxml=long.xml"; make test ARGS="--junitxml=test.xml"
    python tests/helpers/tiers.py long.xml test.xml
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

SECONDS = 1.25  # that a test of `make test` may take, next to another worker
_GROUP = re.compile(r"@[^\]]*$")  # that xdist adds to a name
LONG = Path(__file__).parents[1] / "long.txt"

# Tests that run however long they take, by prefix: a training under a launcher, and one test of each mechanism that no
# other test in `make test` covers (see tests/conformance/canaries.py).
KEPT = (
    "tests/examples/test_readme.py::test_its_code_runs",
    "tests/propagation/program/test_recompute.py::"
    "test_checkpointed_blocks_give_the_numbers_of_one_device_and_are_not_kept[0.5-batch]",
    "tests/propagation/program/test_priced_anew.py::"
    "test_a_plan_within_a_limit_claims_what_it_computes_and_sends_again_too[gpt2]",
    "tests/runtime/test_loaded.py::test_gloo_ranks_compute_the_loss_and_gradients_of_simulated_ranks",
    "tests/runtime/ranks/test_ledger.py::test_the_thread_outlives_idle_turns",
    "tests/models/test_gloo_features.py::test_batch_norm_keeps_the_statistics_of_one_device",
    "tests/models/test_vocabulary.py::test_a_split_vocabulary_over_processes",
    "tests/models/test_features.py::test_a_saved_plan_gives_the_same_parameter_layouts",
    "tests/models/test_features.py::test_collectives_are_grouped_unless_asked_otherwise_and_no_bit_changes",
    "tests/test_house.py",
    "tests/test_layers.py",
    "tests/test_no_code_from_data.py",
    "tests/test_public_surface.py",
)


def long() -> frozenset[str]:
    """The tests that `make test` omits."""
    return frozenset(line for line in LONG.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))


def took(path: str) -> Iterator[tuple[str, float]]:
    """The seconds of each test in a report of pytest, by pytest's names of tests."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        yield f"{file}.py::{_GROUP.sub('', case.get('name', ''))}", float(case.get("time", 0))


def write(reports: Iterable[str]) -> None:
    """Write `long.txt`."""
    seconds = {name: time for path in reports for name, time in took(path)}
    names = sorted(name for name, time in seconds.items() if time > SECONDS and not name.startswith(KEPT))
    LONG.write_text("\n".join([f"# {len(names)} tests; written by tests/helpers/tiers.py", *names, ""]))


if __name__ == "__main__":
    write(sys.argv[1:])
