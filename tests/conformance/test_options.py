"""docs/options.md describes every option as the options do, and names every environment variable."""

import re

import options
from sources import sources


def test_the_page_lists_every_option_as_help_does():
    text = options.PAGE.read_text(encoding="utf-8")
    assert text == options.page(text), "run python tests/conformance/options.py --write"


def test_the_page_names_every_variable_of_the_environment():
    texts = [path.read_text(encoding="utf-8") for path in sources().values()]
    read = {name for source in texts for name in re.findall(r"\"((?:PARTWAY|MS)_[A-Z_]+)\"", source)}
    text = options.PAGE.read_text(encoding="utf-8")
    assert sorted(name for name in read - {"MS_WORKER", "MS_SCHED"} if f"`{name}`" not in text) == []
