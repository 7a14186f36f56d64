"""The cache of ingredients: a file with one JSON object in each line, the key of a spec and its ingredients. A line is
written as soon as a spec is planned, so that an interrupted run continues where it ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from published_plans import Spec, ingredients


@dataclass
class Cache:
    """The ingredients of specs, in a file.

    failed    why a spec could not be planned, by its key
    """

    path: Path
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Cache:
        """The cache in a file, which may be missing."""
        cache = cls(path)
        if path.exists():
            with path.open() as file:
                for line in file:
                    entry = json.loads(line)
                    cache.known[entry["key"]] = entry
        return cache

    def plan(self, specs: Iterable[Spec]) -> None:
        """Plan those of `specs` that are missing."""
        missing = [spec for spec in dict.fromkeys(specs) if spec.key not in self.known]
        for place, spec in enumerate(missing):
            start = time.perf_counter()
            try:
                found = ingredients(spec)
            except Exception as error:  # the row is reported with it
                self.failed[spec.key] = f"{type(error).__name__}: {str(error)[:300]}"
                print(
                    f"{place + 1} of {len(missing)}: {spec.key}: {self.failed[spec.key]}", file=sys.stderr, flush=True
                )
                continue
            entry = {"key": spec.key, **found}
            self.known[spec.key] = entry
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry, separators=(",", ":")) + "\n")
            print(
                f"{place + 1} of {len(missing)}: {spec.key}: {time.perf_counter() - start:.1f} s",
                file=sys.stderr,
                flush=True,
            )
