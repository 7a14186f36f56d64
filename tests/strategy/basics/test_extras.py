import re
import tomllib
from pathlib import Path

from sources import sources

from partway.strategy.basics.extras import install_extra

ROOT = Path(__file__).parents[3]


def test_the_command_names_the_extra_and_the_place() -> None:
    assert install_extra("data") == "pip install '.[data]' in Partway's checkout"


def test_every_extra_that_a_message_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources().values())
    named = set(re.findall(r"install_extra\('(\w+)'\)", text))
    assert {"data", "ps", "k8s", "ssl"} <= named <= extras.keys()


def test_the_text_is_written_once() -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in sources().items()}
    assert [name for name, text in texts.items() if "pip install '.[" in text] == ["strategy/basics/extras.py"]
