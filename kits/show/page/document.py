"""The page: one self-contained HTML file, which works from a disk and fetches nothing.

Its head forbids the browser to fetch anything, and to run any script but Partway's own. It contains the plan in its
saved form, in parts that a browser reads one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from partway.propagation.plan import PlanData
from partway.show.lanes import SCRIPT as LANES
from partway.show.page import tables
from partway.show.page.facts import CODES, KINDS, Said, facts
from partway.show.page.markup import head, safe
from partway.strategy.basics import human, lasting

PART = 2000  # operators, or collectives, that a browser reads at once


@dataclass(frozen=True)
class Section:
    """A part of the page: its name in the address, its title, and its content as HTML. `plan`: the number of its plan,
    if there are several; -1: of all."""

    name: str
    title: str
    body: str
    plan: int = -1


@dataclass(frozen=True)
class Shown:
    """A plan on a page: its name, the known alternatives, and further sections."""

    plan: PlanData
    name: str = ""
    known: Said = field(default_factory=Said)
    sections: tuple[Section, ...] = ()


def document(shown: Sequence[Shown], title: str, first: Sequence[Section] = ()) -> str:
    """The page of these plans, with the sections `first` before those of each plan."""
    sections = [*first]
    for number, each in enumerate(shown):
        of = number if len(shown) > 1 else -1
        sections += [replace(section, plan=of) for section in (*_sections(each), *each.sections)]
    scripts = [asset("cytoscape.min.js"), asset("page.js")]
    scripts += [LANES] if any(section.name == "timeline" for section in sections) else []
    return "".join(_document(shown, title, sections, scripts))


def _document(shown: Sequence[Shown], title: str, sections: Sequence[Section], scripts: Sequence[str]) -> Iterator[str]:
    yield head(title, f"\n{asset('page.css')}", scripts, blobs=True)
    yield '<a class="skip" href="#graph">To the graph</a>\n<header>\n'
    yield f"<h1>{safe(title)}</h1>\n"
    yield from _switch(shown)
    for number, each in enumerate(shown):
        yield f'<div data-plan="{number}">{tables.headline(each.plan)}</div>\n'
    named = {section.name: section.title for section in sections}
    links = "".join(f'<a href="#{name}">{safe(text)}</a>' for name, text in {"graph": "Graph", **named}.items())
    yield f'<nav class="sections" aria-label="Sections">{links}</nav>\n</header>\n<main>\n{_graph(len(shown) > 1)}\n'
    for section in sections:
        of = f' data-plan="{section.plan}"' if section.plan >= 0 else ""
        yield f'<section id="{section.name}"{of}>\n<h2>{safe(section.title)}</h2>\n{section.body}\n</section>\n'
    yield "</main>\n<footer>Made by Partway. It fetches nothing. cytoscape.js and dagre draw the graph.</footer>\n"
    for each in shown:
        yield from _data(each)
    yield f'<script type="text/plain" id="dagre">{asset("dagre.min.js")}</script>\n'
    for script in scripts:
        yield f"<script>{script}</script>\n"
    yield "</body>\n</html>\n"


def compact(plan: PlanData) -> str:
    """The view of a plan in a notebook: its figures and tables, without the graph."""
    collectives = tables.dearest(plan, Said())
    style = (
        ".partway dl{display:flex;flex-wrap:wrap;gap:4px 24px;margin:0}.partway dt{opacity:.7;font-size:12px}"
        ".partway dd{margin:0;font-weight:600}.partway td,.partway th{text-align:left;padding:2px 10px 2px 0}"
        ".partway svg{width:100%;max-width:800px;height:24px}.partway i{display:inline-block;width:12px;height:9px;"
        "margin-right:5px}.partway .barfill{display:none}.partway button{all:unset}"
    )
    return (
        f'<div class="partway"><style>{style}</style><strong>plan on {safe(plan.mesh)}</strong>{tables.headline(plan)}'
        f"{tables.costs(plan)}<details><summary>{len(plan.collectives):,} collectives</summary>{collectives}</details>"
        f"<details><summary>memory</summary>{tables.memory(plan.memory)}</details>"
        f"<p>save_html(path) makes a page with the graph.</p></div>"
    )


def _sections(each: Shown) -> Iterator[Section]:
    plan = each.plan
    yield Section("collectives", "Collectives", tables.dearest(plan, each.known))
    yield Section("costs", "Time and bytes", tables.costs(plan))
    yield Section("memory", "Memory of a rank", tables.memory(plan.memory))
    yield Section("annotations", "Annotated and inferred", tables.annotated(plan, each.known))
    yield Section("certificate", "What the search knows", tables.certificate(plan))


def _switch(shown: Sequence[Shown]) -> Iterator[str]:
    if len(shown) < 2:
        return
    yield '<fieldset class="plans"><legend class="soft">Shown below</legend>'
    for number, each in enumerate(shown):
        checked = " checked" if not number else ""
        sums = f"{lasting(each.plan.predicted_time)}, {human(each.plan.wire_bytes)} sent"
        yield (
            f'<label><input type="radio" name="plan" value="{number}"{checked}> {safe(each.name)} '
            f'<span class="soft">{sums}</span></label>'
        )
    yield "</fieldset>\n"


def _graph(several: bool) -> str:
    codes = "".join(
        f'<span><i style="background:{colour}"></i>{code}: {words}</span>'
        for code, (words, colour) in CODES.items()
        if code != "S"
    )
    kinds = "".join(
        f'<span><i class="line" style="background:{colour}"></i>{kind}</span>' for kind, colour in KINDS.items()
    )
    differs = '<span><i style="background:#e0a100"></i>decided otherwise in the other plan</span>' if several else ""
    return asset("graph.html").replace("CODES", codes).replace("KINDS", kinds).replace("DIFFERS", differs)


def _data(each: Shown) -> Iterator[str]:
    """The plan in its saved form, and the facts beside it."""
    plan: dict[str, Any] = json.loads(each.plan.model_dump_json())
    operators, collectives = plan.pop("operators"), plan.pop("collectives")
    yield f'<div class="plan-data" hidden>{_json("plan-head", plan)}'
    for kind, rows in (("plan-operators", operators), ("plan-collectives", collectives)):
        for start in range(0, len(rows), PART):
            yield _json(kind, rows[start : start + PART])
    yield f"{_json('plan-facts', facts(each.plan, each.known))}</div>\n"


def _json(kind: str, value: Any) -> str:
    """A value as JSON in a script element; no text in the value can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" class="{kind}">{text}</script>\n'


@cache
def asset(name: str) -> str:
    """A file of the package, in which no text can end a script or style element."""
    assert __package__ is not None
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
