"""The documentation as a site: it builds without a warning, needs no other host, has every public name and no dead
link, and its search answers what a newcomer asks."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch

import partway as pw
from partway.strategy.placement import Kind

ROOT = Path(os.environ.get("PARTWAY_CHECKOUT", Path(__file__).parents[2]))  # the sources are in the site
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

QUESTIONS = {  # what a newcomer types into the search, and the pages that answer
    "how do I split a GPT with tensor parallelism": "tutorials/gpt/",
    "data parallel with gradients in groups": "tutorials/data_parallel/",
    "image too large for one device": "large_images/",
    "mixture of experts": "tutorials/experts/",
    "out of memory": "tutorials/memory/",
    "how do I move from FSDP": "tutorials/fsdp2/",
    "why is this collective there": "see/",
    "how do I save a checkpoint": "checkpoints/",
    "run with torchrun": "launch/",
    "what is Partial": "glossary/",
}

pytestmark = [pytest.mark.xdist_group("site"), pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    site = tmp_path_factory.mktemp("docs") / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return site


@pytest.fixture(scope="session")
def pages(built: Path) -> dict[str, str]:
    """The text of each page by its path."""
    return {path.relative_to(built).as_posix(): path.read_text(encoding="utf-8") for path in built.rglob("*.html")}


def test_no_page_fetches_anything_from_another_host(built: Path, pages: dict[str, str]) -> None:
    sources = r"""<(?:script|img|iframe|source)[^>]* src="?(?:https?:)?//"""
    sheets = r"""<link[^>]*rel="?(?:stylesheet|preconnect|icon)"?[^>]*href="?(?:https?:)?//"""
    loaded = re.compile(f"{sources}|{sheets}")
    assert [name for name, text in pages.items() if loaded.search(text)] == []
    styles = {path.name: path.read_text(encoding="utf-8") for path in built.rglob("*.css")}
    assert [name for name, text in styles.items() if re.search(r"url\([\"']?https?:|@import", text)] == []


def test_every_link_leads_to_a_page_and_a_heading_of_it(pages: dict[str, str], built: Path) -> None:
    names = {name: set(re.findall(r"""\b(?:id|name)="?([^"\s>]+)""", text)) for name, text in pages.items()}
    dead = []
    for name, text in pages.items():
        if name == "404.html":
            continue
        for link in re.findall(r"""<a[^>]* href="([^"]*)\"""", text):
            parts = urlsplit(unescape(link))
            if parts.scheme or parts.netloc:
                continue
            target = (built / name).parent / unquote(parts.path) if parts.path else built / name
            target = target / "index.html" if target.is_dir() else target
            found = os.path.relpath(target, built)
            if not target.exists() or (
                found in names and parts.fragment and unescape(unquote(parts.fragment)) not in names[found]
            ):
                dead.append(f"{name}: {link}")
    assert dead == []


def public_names() -> Iterator[str]:
    for name in pw.__all__:
        inner = getattr(pw, name)
        if name in ("data", "ops", "ps"):
            yield from (f"partway.{name}.{each}" for each in inner.__all__)
        else:
            yield f"partway.{name}"


def test_every_public_name_has_an_entry(pages: dict[str, str]) -> None:
    reference = "".join(text for name, text in pages.items() if name.startswith("reference/"))
    entries = set(re.findall(r"""id="?(partway\.[\w.]+)""", reference))
    assert sorted(set(public_names()) - entries) == []


def test_each_page_is_in_the_navigation() -> None:
    nav = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    files = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert files == nav


def tool(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "tools" / f"{name}.py"))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another PyTorch writes other operators")
def test_the_drawings_are_what_the_script_makes() -> None:
    made = tool("drawings")["drawings"]()
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "images").glob("*.svg")}
    assert sorted(made) == sorted(files)
    assert [name for name in made if made[name] != files[name]] == []


def test_the_glossary_has_a_drawing_for_each_placement_and_conversion() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    drawn = {path.name for path in (ROOT / "docs" / "images").glob("*_*.svg")} - {"first_plan.svg"}
    assert set(re.findall(r"\(images/(.*?)\)", text)) == drawn
    assert {f"conversion_{kind}.svg" for kind in Kind} <= drawn


def test_a_docstring_for_a_terminal_becomes_lists_and_code() -> None:
    text = "Say *how*.\n\n    x = f_(1)\n\n    y = 2\n\na, b    the first:\n        more\nc       `d*`\n\nThe end."
    assert tool("docstrings")["markdown_of"](text) == (
        "Say \\*how\\*.\n\n```python\nx = f_(1)\n```\n\n```python\ny = 2\n```\n\n"
        "* **`a, b`**: the first:\n  more\n\n* **`c`**: `d*`\n\nThe end."
    )


# The theme's own search box, in a frame of a page of the same host, which types one question after another.
ASK = """<!doctype html><iframe id=site src="index.html" width=1200 height=900></iframe><script>
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds))
const ask = async (site, question, before) => {
  const box = site.querySelector(".md-search__input")
  if (!site.querySelector("#__search").checked) site.querySelector("#__search").click()
  box.focus()
  box.value = question
  for (const kind of ["input", "keyup"]) box.dispatchEvent(new KeyboardEvent(kind, { bubbles: true, key: "e" }))
  let seen = before, same = 0
  for (let i = 0; i < 300 && same < 5; i++) {
    await wait(100)
    const found = [...site.querySelectorAll(".md-search-result__item > a")]
      .filter(each => each.offsetHeight && each.getBoundingClientRect().bottom <= 900) // without scrolling
      .map(each => each.href).join(" ")
    same = found && found != before && found == seen ? same + 1 : 0
    seen = found
  }
  return seen
}
const frame = document.getElementById("site")
frame.onload = async () => {
  const state = frame.contentDocument.querySelector(".md-search-result__meta")
  for (let i = 0; i < 600 && state.textContent.includes("Initializing"); i++) await wait(100)
  const answers = {}
  let last = ""
  for (const question of QUESTIONS) {
    last = await ask(frame.contentDocument, question, last)
    answers[question] = last.split(" ")
  }
  fetch("/answers", { method: "POST", body: JSON.stringify(answers) })
}
</script>"""


@pytest.fixture(scope="session")
def answers(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The addresses that the site's search shows for each question without scrolling, the best first."""
    came: queue.Queue[bytes] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            came.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    (built / "ask.html").write_text(ASK.replace("QUESTIONS", json.dumps(list(QUESTIONS))), encoding="utf-8")
    profile = tmp_path_factory.mktemp("browser")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(built))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", f"--user-data-dir={profile}"]
        options += ["--remote-debugging-port=0", "--window-size=1300,1000"]
        address = f"http://127.0.0.1:{server.server_port}/ask.html"
        browser = subprocess.Popen([str(CHROMIUM), *options, address], stderr=subprocess.DEVNULL)
        try:
            return dict(json.loads(came.get(timeout=500)))
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            (built / "ask.html").unlink()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to search with")
@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_the_search_answers_on_its_first_page(question: str, page: str, answers: dict[str, list[str]]) -> None:
    assert page in [urlsplit(address).path.removeprefix("/") for address in answers[question]]
