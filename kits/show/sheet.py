"""A page of text, tables and pictures: one file that works from a disk and fetches nothing.

Its head forbids the browser to fetch anything, and to run any script but the given one.
"""

from __future__ import annotations

from partway.show.page.markup import head, safe

_STYLE = """
:root { color-scheme: light dark; --line: #c9ccd3; --soft: #555b66; }
body { font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; max-width: 1280px; margin: 2rem auto; padding: 0 1.2rem;
  background: #ffffff; color: #16181d; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em 1.1em .25em 0; text-align: left; font-weight: normal; vertical-align: top; }
.wide th { white-space: nowrap; }
thead th { font-weight: 600; border-bottom: 1px solid currentColor; }
td.number, th.number { text-align: right; white-space: nowrap; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a3e47; --soft: #a9afbb; }
  body { background: #1b1b1f; color: #e8eaee; }
}
@media print { body { background: #fff; color: #000; margin: 0; max-width: none; } .soft, footer { color: #333; } }
"""


def sheet_of(title: str, body: str, style: str = "", script: str = "") -> str:
    """The page: `title` is text, `body` HTML."""
    return (
        f"{head(title, _STYLE + style, [script] if script else [])}<main>\n<h1>{safe(title)}</h1>\n{body}\n</main>\n"
        "<footer>Made by Partway. It fetches nothing.</footer>\n"
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )
