"""Text stays text, and the head of a page allows what is written into it alone."""

from __future__ import annotations

from partway.show.page.markup import head, safe


def test_words_are_text_and_what_cannot_be_printed_is_shown():
    assert safe('</script><b title="x">\x00\u202e') == "&lt;/script&gt;&lt;b title=&quot;x&quot;&gt;��"
    assert safe([1]) == "[1]"


def test_a_page_without_scripts_may_run_none():
    text = head("<b>", "p {}", [])
    assert "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'" in text
    assert "<title>&lt;b&gt;</title>\n<style>p {}</style>" in text


def test_only_these_scripts_may_run_and_blobs_where_they_are_asked_for():
    text = head("x", "", [""], blobs=True)
    digest = "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="  # of an empty script
    assert f"script-src 'sha256-{digest}' blob:; worker-src blob:; img-src data: blob:; style-src" in text
