"""`partway bench experts`: each form computes what one device does, and sends what its formula says (no times)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from partway.commands.cli import app
from partway.measure import bench_experts as bench
from partway.measure.bench_experts import BY_HAND, FORMS, ExpertsCase, ExpertsResult
from partway.strategy import RuntimeStateError


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "experts", *arguments])
    return result.exit_code, result.output


def test_all_forms_are_checked_and_timed_on_processes(tmp_path: Path) -> None:
    code, said = command("--quick", "--json", str(tmp_path / "figures.json"))
    assert code == 0, said
    found = json.loads((tmp_path / "figures.json").read_text())
    assert list(found["seconds"]) == [*FORMS, BY_HAND, "DDP", "FSDP2"]
    assert {len(seconds) for seconds in found["seconds"].values()} == {2}
    assert all(name in said for name in found["seconds"])
    n, tokens, width, hidden, experts = 2, 64, 16, 24, 8
    weights = 3 * experts * width * hidden
    assert found["bytes"]["partway, experts whole"] >= 4 * weights
    # rows there and back and their gradients but for those of x, which nobody asked for; counts; the router
    rows, counts, router = tokens * 2 * width, experts, experts * width
    assert found["collectives"]["partway, experts split"] in (5, 6)
    assert found["bytes"]["partway, experts split"] <= 4 * (1.2 * 3 * rows + counts + router * n + 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 0}, r"^world is 0; it must be 1 or more$"),
        ({"tokens": 0}, r"^tokens is 0; it must be 1 or more$"),
        ({"world": 3}, r"^8 experts: there must be at least k = 2, and as many on each of 3 processes$"),
        ({"k": 9}, r"^8 experts: there must be at least k = 9, and as many on each of 2 processes$"),
    ],
)
def test_numbers_that_make_no_layer_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(RuntimeStateError, match=message):
        bench.bench_experts(**options)


def test_the_table_has_ratios_to_the_exchange_by_hand() -> None:
    case = ExpertsCase(2, 2, 1024, 256, 896, 8, 2)
    result = ExpertsResult(case, {"partway": (0.1, 0.3), BY_HAND: (0.2, 0.2)}, {"partway": 5}, {"partway": 2_000_000})
    said = " ".join(result.report().split())
    assert "8 experts of 256 and 896 features, 2 of them for each of 1,024 tokens on each of 2 processes" in said
    assert "200.0 (100.0-300.0)" in said
    assert result.ratios("partway") == (0.5, pytest.approx(1.5))
    assert result.data()["over_by_hand"]["partway"] == pytest.approx(1.0)


def test_a_contender_that_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "disagreements", lambda each, *_: ["off"] if each.name == BY_HAND else [])
    monkeypatch.setattr(bench, "contenders_of", lambda *_: [type("C", (), {"name": name}) for name in ("a", BY_HAND)])
    with pytest.raises(RuntimeStateError, match=r"^by hand does not compute what one device does\noff$"):
        bench.check(ExpertsCase(2, 1, 16, 16, 24, 8, 2).small, 2)
