"""A page fetches nothing, runs no script but its own, and takes its title for text."""

from __future__ import annotations

import base64
import hashlib

from partway.show.sheet import sheet_of


def test_a_page_runs_no_script_but_its_own_and_fetches_nothing() -> None:
    script = "let a = 1;"
    page = sheet_of("A page", "<p>x</p>", script=script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src" in page
    assert page.count("<script") == 1
    assert "http:" not in page
    assert "https:" not in page
    assert "script" not in sheet_of("A page", "<p>x</p>")


def test_a_title_is_text() -> None:
    page = sheet_of("</title><script>", "")
    assert "<script" not in page
    assert "<h1>&lt;/title&gt;&lt;script&gt;</h1>" in page


def test_there_are_colours_for_dark_and_for_paper() -> None:
    page = sheet_of("A page", "")
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
