"""Pages in a real browser: what one clicks, types and reads; no error, and no request leaves.

Skipped where there is no Chromium (Debian's package; `make conformance` installs it).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partway as pw
from partway.show.pages import page as page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOCAL = ("file:", "blob:", "data:")
HOSTILE = '</script><img src=x onerror="window.harmed=1">'

# The texts whose contrast with what is behind them is less than 4.5, by the formula of WCAG 2.
CONTRAST = r"""() => {
  const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const part = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r / 255) + 0.7152 * part(g / 255) + 0.0722 * part(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] > 0.5) return found;
    }
    return [255, 255, 255];
  };
  const written = (node) => [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
  return [...document.querySelectorAll("body *")]
    .filter((node) => !node.closest("svg, #cy, script, style, [hidden]") && written(node))
    .map((node) => {
      const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.className, node.textContent.slice(0, 30)];
    })
    .filter(([ratio]) => ratio < 4.5);
}"""
# What acts and says nothing.
NAMELESS = """() => [...document.querySelectorAll("button, input, [role], summary")]
  .filter((node) => !node.textContent.trim() && !node.getAttribute("aria-label") && !node.labels?.length)
  .map((node) => node.outerHTML.slice(0, 80))"""

pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.stem, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, labels):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def planned(**annotated: Any) -> pw.Plan:
    with torch.device("meta"):
        inputs = torch.empty(16, 64), torch.empty(16, dtype=torch.long)
        module = Classifier()
    return pw.compile(module, inputs, mesh={"dp": 2, "tp": 4}, in_strategy=(("dp", None),), **annotated).plan


@pytest.fixture(scope="module")
def plan() -> pw.Plan:
    return planned(parameter_plan={"blocks.*.up.weight": ("tp", None)})


@pytest.fixture(scope="module")
def folder(plan: pw.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pages: of one plan, of two, and of plans that are odd."""
    where = tmp_path_factory.mktemp("pages")
    plan.save(where / "a.json")
    planned().save(where / "b.json")
    plan.save_html(where / "one.html", alternatives=3)
    (where / "two.html").write_text(page_of([where / "a.json", where / "b.json"]), encoding="utf-8")
    empty = {"operators": (), "collectives": (), "inputs": (), "outputs": ()}
    plan.model_copy(update=empty).save_html(where / "empty.html")
    before = tuple(o.model_copy(update={"producers": None}) for o in plan.operators)
    plan.model_copy(update={"operators": before}).save_html(where / "before.html", alternatives=0)
    names = {o.name: f"{HOSTILE}{i}" for i, o in enumerate(plan.operators)}

    def renamed(producer):
        return producer.model_copy(update={"name": names.get(producer.name, producer.name)})

    hostile = tuple(
        o.model_copy(
            update={
                "name": names[o.name], "module": HOSTILE, "source": HOSTILE, "annotation": HOSTILE,
                "producers": tuple(map(renamed, o.producers)),
            }
        )
        for o in plan.operators
    )  # fmt: skip
    outputs = tuple(t.model_copy(update={"producer": renamed(t.producer)}) for t in plan.outputs)
    plan.model_copy(update={"operators": hostile, "outputs": outputs, "collectives": ()}).save_html(
        where / "hostile.html", alternatives=0, title=HOSTILE
    )
    return where


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def shown(browser: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens a page and waits until it answers. At the end there was no error and no request left."""
    problems: list[str] = []
    with contextlib.ExitStack() as stack:

        def show(name: str, **options: Any) -> Any:
            window = browser.new_page(**{"viewport": {"width": 1400, "height": 1000}, **options})
            stack.callback(window.close)
            window.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
            window.on("pageerror", lambda error: problems.append(str(error)))
            window.on("dialog", lambda dialog: problems.append(dialog.message))
            window.on("request", lambda each: problems.extend([] if each.url.startswith(LOCAL) else [each.url]))
            window.goto((folder / name).as_uri())
            window.wait_for_selector("html[data-ready=true]", timeout=60_000)
            return window

        yield show
        assert problems == []


def heading(window: Any) -> str:
    return window.inner_text("#selected h2")


def settled(window: Any) -> None:
    """Wait until the graph is drawn, if it is being drawn."""
    window.wait_for_selector("#busy", state="hidden", timeout=60_000)


def drawn(window: Any, act: Callable[[], Any]) -> None:
    """Do something that draws the graph anew, and wait until it is drawn."""
    before = window.get_attribute("html", "data-drawn")
    act()
    window.wait_for_selector(f"html:not([data-drawn='{before}'])", timeout=60_000)
    settled(window)


def nodes(window: Any) -> list[str]:
    return window.evaluate("window.partway.graph.nodes().map((node) => node.data('label'))")


def centre(window: Any, label: str) -> tuple[float, float]:
    """Where the node with this label is in the window."""
    x, y = window.evaluate(
        """(label) => {
          const node = window.partway.graph.nodes().filter((each) => each.data('label') === label)[0];
          const box = document.querySelector('#cy').getBoundingClientRect();
          const { x1, y1, w, h } = node.renderedBoundingBox({ includeLabels: false });
          return [box.left + x1 + w / 2, box.top + y1 + h / 2];
        }""",
        label,
    )
    return x, y


def find(window: Any, text: str) -> None:
    window.fill("#search", text)
    window.press("#search", "Enter")
    settled(window)


def test_at_first_layers_are_one_and_everything_is_said(shown, plan):
    window = shown("one.html")
    assert any("×" in label for label in nodes(window))
    assert heading(window) == "the whole step"
    panel = window.inner_text("#selected")
    assert f"{len(plan.operators)}" in panel
    assert "Collectives: " in panel


def test_a_click_selects_an_operator_and_an_edge(shown):
    window = shown("one.html")
    window.mouse.click(*centre(window, "stem · linear"))
    assert heading(window) == "stem"
    drawn(window, window.locator("#selected dd button.link").first.click)
    assert heading(window) == "linear"
    assert "aten.linear.default" in window.inner_text("#selected")
    edge = window.evaluate("window.partway.graph.edges().filter((edge) => edge.data('collectives').length > 0).length")
    assert edge > 0
    x, y = window.evaluate(
        """() => {
          const edge = window.partway.graph.edges().filter((each) => each.data('collectives').length > 0)[0];
          const box = document.querySelector('#cy').getBoundingClientRect();
          const middle = edge.renderedMidpoint();
          return [box.left + middle.x, box.top + middle.y];
        }"""
    )
    window.mouse.click(x, y)
    assert " over " in heading(window)
    panel = window.inner_text("#selected")
    for words in ("because", "bytes", "Which ranks talk", "groups of", "A colour is a group."):
        assert words in panel


def test_search_reveals_what_is_folded(shown):
    window = shown("one.html")
    assert "blocks.2.up.weight" not in window.inner_text("#selected")
    window.fill("#search", "blocks.2.up")
    assert window.locator("#found li").count() >= 2
    drawn(window, lambda: window.press("#search", "Enter"))
    assert heading(window) == "blocks.2.up"
    window.fill("#search", "blocks.2.up.weight")
    window.press("#search", "Enter")
    assert heading(window) == "blocks.2.up.weight"
    assert "this annotation" in window.inner_text("#selected")
    assert window.locator("#selected svg[role=img]").count() >= 1
    window.fill("#search", "nothing like it")
    assert window.locator("#found li").count() == 0
    assert window.inner_text("#said") == "nothing is called that"


def test_folding_by_double_click_and_from_the_tree(shown):
    window = shown("one.html")
    stack = next(label for label in nodes(window) if "×" in label)
    before = len(nodes(window))
    drawn(window, lambda: window.mouse.dblclick(*centre(window, stack)))
    assert len(nodes(window)) > before
    drawn(window, lambda: window.click("[data-do=fold]"))
    assert len(nodes(window)) < before
    item = window.locator("[role=treeitem][aria-expanded=false]").first
    item.focus()
    drawn(window, lambda: item.press("ArrowRight"))
    assert window.locator("[role=treeitem][aria-expanded=true]").count() >= 1
    drawn(window, lambda: window.keyboard.press("ArrowLeft"))
    assert window.locator("[role=treeitem][aria-expanded=true]").count() == 0


def test_the_tree_is_walked_by_keys(shown):
    window = shown("one.html")
    first = window.locator("[role=treeitem][tabindex='0']")
    assert first.count() == 1
    first.focus()
    name = window.evaluate("document.activeElement.dataset.id")
    window.keyboard.press("ArrowDown")
    assert window.evaluate("document.activeElement.dataset.id") != name
    window.keyboard.press("End")
    last = window.evaluate("document.activeElement.dataset.id")
    window.keyboard.press("Enter")
    window.wait_for_selector(f"[role=treeitem][data-id='{last}'][aria-selected=true]")
    window.keyboard.press("Home")
    assert window.evaluate("document.activeElement.dataset.id") == name


def test_the_graph_is_walked_by_keys(shown):
    window = shown("one.html")
    window.focus("#cy")
    window.keyboard.press("ArrowDown")
    first = heading(window)
    window.keyboard.press("ArrowDown")
    second = heading(window)
    assert len({first, second, "the whole step"}) == 3
    window.keyboard.press("ArrowUp")
    assert heading(window) == first
    zoom = window.evaluate("window.partway.graph.zoom()")
    window.keyboard.press("+")
    assert window.evaluate("window.partway.graph.zoom()") > zoom
    window.keyboard.press("Escape")
    assert heading(window) == "the whole step"
    window.keyboard.press("/")
    assert window.evaluate("document.activeElement.id") == "search"


def test_weights_are_nodes_when_they_are_asked_for(shown):
    window = shown("one.html")
    assert "stem.weight" not in nodes(window)
    find(window, "stem.bias")
    drawn(window, lambda: window.check("#weights"))
    assert "stem.weight" in nodes(window)


def test_a_row_of_the_collectives_selects_it_in_the_graph(shown, plan):
    window = shown("one.html")
    window.locator("button[data-collective]").first.click()
    dearest = max(plan.collectives, key=lambda c: c.predicted_time)
    assert heading(window) == f"{dearest.kind} over {', '.join(dearest.axes)}"
    assert "aused by" in window.inner_text("#selected")
    window.locator("button[data-find]").first.click()
    assert heading(window)


def test_two_plans_are_switched_and_what_differs_is_outlined(shown):
    window = shown("two.html")
    assert window.evaluate("window.partway.graph.nodes('.differs').length") > 0
    seconds = window.inner_text("div[data-plan='0'] dl")
    assert window.is_hidden("div[data-plan='1']")
    drawn(window, lambda: window.check("input[name=plan][value='1']"))
    assert window.is_hidden("div[data-plan='0']")
    assert window.inner_text("div[data-plan='1'] dl") != seconds
    assert "B is predicted to be faster" in window.inner_text("#compare")
    drawn(window, lambda: window.check("input[name=plan][value='0']"))
    assert window.is_visible("div[data-plan='0']")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty.html", "operators"),
        ("before.html", "did not keep which tensors each operator reads"),
        ("hostile.html", "</script><img src=x"),
    ],
)
def test_odd_plans_have_pages(shown, name, said):
    window = shown(name)
    assert said in window.inner_text("body")
    assert window.evaluate("window.harmed") is None
    assert window.locator("img").count() == 0


def test_hostile_names_are_names_in_the_panel_and_the_search(shown):
    window = shown("hostile.html")
    find(window, "onerror")
    assert HOSTILE in heading(window)
    assert window.evaluate("window.harmed") is None
    assert window.locator("img").count() == 0


def test_on_a_phone_nothing_is_wider_than_the_screen(shown):
    window = shown("one.html", viewport={"width": 390, "height": 800})
    assert window.evaluate("document.documentElement.scrollWidth") <= 390
    assert window.locator("#cy").bounding_box()["height"] > 250
    window.locator("#selected").scroll_into_view_if_needed()
    assert window.is_visible("#selected h2")


def test_it_prints_without_buttons_and_with_the_tables(shown):
    window = shown("one.html")
    window.emulate_media(media="print")
    assert window.is_hidden(".bar")
    assert window.is_visible("#collectives table")
    assert window.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_of_aa(shown, scheme):
    window = shown("one.html", color_scheme=scheme)
    window.locator("button[data-collective]").first.click()
    poor = window.evaluate(CONTRAST)
    assert poor == []


def test_everything_that_acts_has_a_name(shown):
    window = shown("one.html")
    nameless = window.evaluate(NAMELESS)
    assert nameless == []
    assert window.get_by_role("tree").count() == 1
    assert window.get_by_role("combobox").count() == 1
    assert window.get_by_role("status").count() == 1


# What a person who did not build it asks, answered from the page alone. Each says how many clicks it took.


def test_which_collective_costs_most_and_why__no_click(shown, plan):
    row = shown("one.html").locator("#collectives tbody tr").first.inner_text()
    dearest = max(plan.collectives, key=lambda c: c.predicted_time)
    assert f"{dearest.kind} over {', '.join(dearest.axes)}" in row
    assert "because" in row
    assert "caused by" in row


def test_what_an_annotation_costs__no_click(shown):
    rows = shown("one.html").locator("#annotations tr").all_inner_texts()
    row = next(row for row in rows if row.startswith("blocks.0.up.weight"))
    assert "('tp', None)" in row
    assert "this annotation" in row


def test_where_the_all_reduce_of_the_loss_comes_from__one_search_and_one_click(shown, plan):
    window = shown("one.html")
    of_loss = next(c for c in plan.collectives if "cross_entropy" in c.source and c.phase == "forward")
    find(window, of_loss.tensor)
    window.locator("#selected button.link", has_text=of_loss.kind).first.click()
    panel = window.inner_text("#selected")
    assert "meets" in panel
    assert "cross_entropy" in panel  # the line of the code


def test_what_a_rank_holds__no_click(shown, plan):
    held = shown("one.html").inner_text("#memory")
    for kind in ("parameters", "optimizer states", "gradients"):
        assert kind in held
    assert plan.memory.at in held


def test_which_of_two_plans_is_better_and_where_they_differ__no_click(shown):
    text = shown("two.html").inner_text("#compare")
    assert "B is predicted to be faster" in text
    assert "Another strategy: linear_1, relu" in text
    assert "-a step is predicted to take" in text
    assert "+a step is predicted to take" in text
