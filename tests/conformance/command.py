"""The command line of scripts that run named models and write a page of the results."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(description: str | None, results: Path) -> argparse.Namespace:
    """The arguments of the command. `results`, the file with earlier results, is deleted if the command requests it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="write the page of all results")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    given = parser.parse_args()
    if given.fresh:
        results.unlink(missing_ok=True)
    results.parent.mkdir(exist_ok=True)
    return given
