"""The basis of every page: escaped text, and a head that forbids the browser to fetch anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from partway.strategy.basics import MARKS


def safe(words: object) -> str:
    """Escape words for the text of a page, also in an attribute; unprintable characters are shown as such."""
    return escape("".join(letter if letter.isprintable() else "�" for letter in str(words)))


def head(title: str, style: str, scripts: Sequence[str], blobs: bool = False) -> str:
    """The beginning of a page, up to its body: nothing can be fetched, and only these scripts can run. `blobs`: a
    script may start workers, and make pictures, from data that it has."""
    allowed = [f"'sha256-{_digest(script)}'" for script in scripts] + ["blob:"] * blobs
    parts = ["default-src 'none'", *([f"script-src {' '.join(allowed)}"] if allowed else [])]
    parts += ["worker-src blob:", "img-src data: blob:"] if blobs else []
    policy = "; ".join([*parts, "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'{MARKS["the page"][0]}\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
