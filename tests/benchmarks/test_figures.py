"""Every measured figure in the pages is one of benchmarks/figures.json, which has it from RESULTS.md."""

from __future__ import annotations

import json
import operator
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
ALL_MARKED = ("README.md", "docs/limits.md", "docs/costs.md")  # pages without a measured figure that has no mark
PAGES = sorted({*ALL_MARKED, *(f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md"))})

MARK = re.compile(r"<!--\s*figure:\s*(\S+)\s*-->")
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
UNITS = ("s", "ms", "µs", "us", "kB", "MB", "GB", "MiB", "GiB", "%", "times")
UNIT = re.compile(rf"(?:{'|'.join(map(re.escape, UNITS))})(?!\w)")
# Text in which numbers are no figures: code, addresses, versions.
OTHER = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)"
    r"|(?:Python|PyTorch|torch|MindSpore|NCCL|License) [\d.]+(?: (?:to|and|or) [\d.]+)?",
    re.S,
)
OPERATORS = {"-": operator.sub, "+": operator.add, "*": operator.mul, "/": operator.truediv}

MEASUREMENTS = figures.read()
FIGURES = {key: (m, figure) for m in MEASUREMENTS for key, figure in m["figures"].items()}


def values_of(figure: dict) -> list[str]:
    return figure["value"] if isinstance(figure["value"], list) else [figure["value"]]


def number(text: str) -> Decimal:
    """The number that a value is, or that its two numbers make."""
    first, *rest = text.split()
    return OPERATORS[rest[0]](number(first), number(rest[1])) if rest else Decimal(first.replace(",", ""))


def rounded(value: str, quoted: str) -> bool:
    """Whether `quoted` is the value to as many digits as it has."""
    said = Decimal(quoted.replace(",", ""))
    return number(value).quantize(said, ROUND_HALF_UP) == said


def problems(text: str, *, all_marked: bool) -> list[str]:
    """What is wrong with the figures of a page."""
    found, begin = [], 0
    text = OTHER.sub(lambda match: re.sub(r"\S", "x", match[0]), text)
    for mark in [*MARK.finditer(text), None]:
        piece = text[begin : mark.start() if mark else len(text)]
        numbers = list(NUMBER.finditer(piece))
        if mark:
            begin = mark.end()
            count, wrong = _wrong(mark[1], piece, numbers)
            found += wrong
            numbers = numbers[: len(numbers) - count]
        if all_marked:
            found += [f"{_around(piece, each)!r} has no mark" for each in numbers if _measured(piece, each)]
    return found


def _wrong(key: str, piece: str, numbers: list[re.Match[str]]) -> tuple[int, list[str]]:
    """How many numbers a mark is for, and what is wrong with them."""
    if key == "given":
        return 1, []
    if key not in FIGURES:
        return 1, [f"there is no figure {key}"]
    figure = FIGURES[key][1]
    values = values_of(figure)
    quoted = [match[0] for match in numbers[-len(values) :]]
    if len(quoted) != len(values) or not all(map(rounded, values, quoted)):
        return len(values), [f"{key} is {' to '.join(values)}, and the page says {' to '.join(quoted)}"]
    unit = piece[numbers[-1].end() :].replace("*", "").strip()
    if UNIT.fullmatch(unit) and unit != figure["unit"]:
        return len(values), [f"{key} is in {figure['unit']}, and the page says {unit}"]
    return len(values), []


def _measured(piece: str, match: re.Match[str]) -> bool:
    """Whether a number looks like a measured one: it has a unit or a decimal point."""
    return "." in match[0] or UNIT.match(piece[match.end() :].lstrip("*").removeprefix(" ")) is not None


def _around(piece: str, match: re.Match[str]) -> str:
    return " ".join(piece[max(0, match.start() - 30) : match.end() + 10].split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_quotes_the_figures_that_were_measured(page: str) -> None:
    assert problems((ROOT / page).read_text(encoding="utf-8"), all_marked=page in ALL_MARKED) == []


def test_every_figure_stands_in_the_section_of_its_measurement() -> None:
    text = RESULTS.read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", text, flags=re.M)[1:]}
    missing = []
    for key, (measurement, figure) in FIGURES.items():
        name = measurement["section"]
        section = (ROOT / name).read_text(encoding="utf-8") if name.endswith(".md") else sections.get(name, "")
        there = set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", section))
        parts = [part for value in values_of(figure) for part in value.split() if part not in OPERATORS]
        missing += [f"{key}: {part} is not in {name}" for part in parts if part not in there]
    assert missing == []


def test_every_measurement_is_described() -> None:
    for measurement in MEASUREMENTS:
        assert all(measurement[name] for name in ("machine", "command", "figures"))
        assert measurement["section"].endswith(".md") or measurement["date"] in measurement["section"]
        for figure in measurement["figures"].values():
            assert figure["unit"] in (*UNITS, "ratio")


def test_no_key_is_in_two_measurements() -> None:
    keys = [key for measurement in MEASUREMENTS for key in measurement["figures"]]
    assert len(keys) == len(set(keys))


def test_every_figure_is_quoted() -> None:
    quoted = {key for page in PAGES for key in MARK.findall((ROOT / page).read_text(encoding="utf-8"))}
    assert sorted(FIGURES.keys() - quoted) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("takes 7.5 s <!-- figure: plan.llama8b.capture -->", "plan.llama8b.capture is 7.4, and the page says 7.5"),
        ("takes 7.4 ms <!-- figure: plan.llama8b.capture -->", "plan.llama8b.capture is in s, and the page says ms"),
        ("takes 7.4 s <!-- figure: plan.llama9b -->", "there is no figure plan.llama9b"),
        ("takes 7 s", "'takes 7 s' has no mark"),
        ("**0.9**", "'**0.9**' has no mark"),
        ("takes 2 times as long", "'takes 2 times as' has no mark"),
    ],
)
def test_what_is_wrong_with_a_figure_is_said(text: str, said: str) -> None:
    assert problems(text, all_marked=True) == [said]


def test_a_quoted_figure_may_be_rounded_and_versions_are_none() -> None:
    text = "7 s <!-- figure: plan.llama8b.capture -->, Python 3.11 to 3.13, `0.5 s`, 8 devices"
    assert problems(f"{text}, 80 GB <!-- figure: given -->", all_marked=True) == []
    assert problems(text, all_marked=True) == []


def test_a_benchmark_writes_its_figures_under_a_new_section(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    old = {
        "section": "Old, 2026-01-01",
        "date": "2026-01-01",
        "machine": "m",
        "command": "python benchmarks/a.py --one",
    }
    mine = {"value": "1.0", "unit": "s", "case": "gpt2: capture"}
    other = {"value": "5", "unit": "s", "case": "llama: capture"}
    by_hand = {"value": "3", "unit": "s"}
    data = {"measurements": [old | {"figures": {"one": mine, "two": by_hand, "three": other}}]}
    path.write_text(json.dumps(data), encoding="utf-8")
    command = "python benchmarks/a.py --rounds 3"
    assert figures.write("New, 2026-02-02", command, {"gpt2: capture": "2.0"}, path) == ["one"]
    assert figures.write("New, 2026-02-02", command, {"llama: capture": "6"}, path) == ["three"]
    assert figures.write("New, 2026-02-02", "python benchmarks/b.py", {"gpt2: capture": "9"}, path) == []
    new, rest = figures.read(path)
    assert (new["section"], new["date"], new["command"]) == ("New, 2026-02-02", "2026-02-02", command)
    assert new["figures"] == {"one": mine | {"value": "2.0"}, "three": other | {"value": "6"}}
    assert rest["figures"] == {"two": by_hand}
