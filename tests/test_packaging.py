"""The installed package is the one that the folders hold, and the one that the tests are meant to run on.

`PARTWAY_CHECKOUT` and `PARTWAY_INSTALL` (editable or wheel) come from the Makefile; a plain `pytest` in a
checkout with an editable install needs neither.
"""

from __future__ import annotations

import os
import re
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from lowest import constraints
from sources import KITS, STAGES, sources

import partway

CHECKOUT = Path(os.environ.get("PARTWAY_CHECKOUT", Path(__file__).parents[1])).resolve()
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
DESIGN = sorted((CHECKOUT / "docs" / "design").glob("*.md"))


def installed_folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).resolve()


def test_every_source_file_is_installed() -> None:
    on_disk = {
        path.relative_to(CHECKOUT).as_posix() for top in (*STAGES, "kits", "partway") for path in files(CHECKOUT / top)
    }
    assert on_disk == sources().keys()


def files(folder: Path) -> Iterator[Path]:
    """The modules of a folder, without what it links to."""
    return (path for path in folder.rglob("*.py") if not any(parent.is_symlink() for parent in path.parents))


def test_the_stages_and_kits_are_linked_to() -> None:
    assert {path.name: str(path.readlink()) for path in (CHECKOUT / "partway").iterdir() if path.is_symlink()} == {
        **{stage: f"../{stage}" for stage in STAGES},
        **{kit: f"../kits/{kit}" for kit in KITS},
    }


def test_pyright_reads_every_link() -> None:
    """It follows none by itself, and says nothing of what it does not read."""
    assert set(PROJECT["tool"]["pyright"]["include"]) == {"partway", *(f"partway/{name}" for name in (*STAGES, *KITS))}


@pytest.mark.parametrize("package", PROJECT["tool"]["setuptools"]["package-data"])
def test_every_data_file_of_the_table_is_installed(package: str) -> None:
    for pattern in PROJECT["tool"]["setuptools"]["package-data"][package]:
        on_disk = {path.name for path in CHECKOUT.joinpath(*package.split(".")).glob(pattern)}
        assert on_disk
        assert {p.name for p in installed_folder(package).glob(pattern)} == on_disk


def test_the_device_profiles_are_in_the_table() -> None:
    assert PROJECT["tool"]["setuptools"]["package-data"]["partway.propagation.cost"] == ["profiles/*.json"]
    assert {p.suffix for p in (CHECKOUT / "propagation" / "cost" / "profiles").iterdir()} == {".json"}


def test_type_checkers_are_told_that_the_package_is_typed() -> None:
    assert (installed_folder("partway") / "py.typed").is_file()


def test_the_tests_run_on_the_installation_that_was_asked_for() -> None:
    asked = os.environ.get("PARTWAY_INSTALL", "editable")
    home = Path(sysconfig.get_path("purelib")) if asked == "wheel" else CHECKOUT
    assert partway.__file__ is not None
    assert Path(partway.__file__).resolve().is_relative_to(home.resolve())


def test_every_direct_dependency_has_an_exact_version_in_the_constraints() -> None:
    lines = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    project = PROJECT["project"]
    needed = [*project["dependencies"], *(n for extra in project["optional-dependencies"].values() for n in extra)]
    named = {re.split(r"[\[;>]", each)[0] for each in [*needed, *(requires("partway") or [])]}
    assert named - pinned == set()


def test_make_oldest_installs_the_lower_bound_of_every_dependency() -> None:
    exact = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8")
    lines = list(constraints(PROJECT["project"], exact))
    assert len({line.split("==")[0] for line in lines}) == len(lines)
    project = PROJECT["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["data"]]:
        assert requirement.replace(">=", "==") in lines


def test_a_dependency_without_a_lower_bound_is_named() -> None:
    project = {"dependencies": ["torch>=2.11", "rich"], "optional-dependencies": {"data": [], "ssl": []}}
    with pytest.raises(SystemExit, match=r"rich has no lower bound in pyproject.toml; write rich>= the lowest"):
        list(constraints(project, ""))


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/design/{page.name}" for page in DESIGN)]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (CHECKOUT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not ((CHECKOUT / page).parent / link).exists()] == []
