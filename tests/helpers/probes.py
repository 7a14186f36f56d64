"""The response to a probe of a server's health."""

from __future__ import annotations

import urllib.error
import urllib.request


def health(url: str) -> tuple[int, str]:
    """The status and the text; (0, "") if there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
