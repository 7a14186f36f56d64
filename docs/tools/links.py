"""What the site needs beside the pages: hooks of MkDocs.

Pages link to files of the repository as a reader of the repository needs it, `../partway/sharding.py`. In the site
such a file is a page of its own, under `repository/`, which no search finds.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")
_FENCE = re.compile(r"^ *```.*?^ *```", re.S | re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """A page for each file of the repository that a page links to."""
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        uri, text = waiting.pop()
        for target in _targets(uri, text):
            if target.startswith("repository/") and files.get_file_from_path(target) is None:
                content = _page_of(target)
                files.append(File.generated(config, target, content=content))
                waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text with links that hold in the site. Pages for users come before the others in the search."""
    uri = page.file.src_uri
    if not uri.startswith(("coverage/", "design/", "reference/", "repository/")):
        page.meta["search"] = {"boost": 3}

    def link(found: re.Match[str]) -> str:
        target = _target(uri, found[1])
        return f"]({posixpath.relpath(target, posixpath.dirname(uri))}"

    return "".join(part if fence else _LINK.sub(link, part) for part, fence in _parts(markdown))


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in parts, and whether each is a block of code."""
    end = 0
    for block in _FENCE.finditer(text):
        yield text[end : block.start()], False
        yield block[0], True
        end = block.end()
    yield text[end:], False


def _targets(uri: str, text: str) -> Iterator[str]:
    yield from (_target(uri, link) for part, fence in _parts(text) if not fence for link in _LINK.findall(part))


def _target(uri: str, link: str) -> str:
    """Where in the site a link of the page `uri` leads."""
    home = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), link))
    if path.startswith("docs/") and not path.startswith("docs/tools/"):
        return path.removeprefix("docs/")
    if path.startswith("..") or not (ROOT / path).exists():
        return posixpath.normpath(posixpath.join(posixpath.dirname(uri), link))  # MkDocs says that it is not there
    if (ROOT / path).is_dir():
        path += "/README.md" if (ROOT / path / "README.md").exists() else "/__init__.py"
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _page_of(target: str) -> str:
    """The page of a file of the repository."""
    path = target.removeprefix("repository/")
    hidden = "---\nsearch:\n  exclude: true\n---\n\n"
    if (ROOT / path).exists():
        return hidden + (ROOT / path).read_text(encoding="utf-8")
    path = path.removesuffix(".md")
    code, kind = (ROOT / path).read_text(encoding="utf-8"), {".py": "python", ".sh": "bash"}.get(Path(path).suffix, "")
    return f"{hidden}# {path}\n\n``````{kind}\n{code}``````\n"
