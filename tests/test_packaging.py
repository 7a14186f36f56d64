"""The installed package is the one that the folders hold, and the one that the tests are meant to run on.

`PARTWAY_CHECKOUT` and `PARTWAY_INSTALL` (editable or wheel) come from the Makefile; a plain `pytest` in a
checkout with an editable install needs neither.
"""

from __future__ import annotations

import os
import re
import sysconfig
import tomllib
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from lowest import constraints

import partway

CHECKOUT = Path(os.environ.get("PARTWAY_CHECKOUT", Path(__file__).parents[1])).resolve()
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
DESIGN = sorted((CHECKOUT / "docs" / "design").glob("*.md"))
TABLE: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def installed_folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None, f"{package} is in the packages table and is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).resolve()


def test_the_packages_table_names_the_folders_of_the_package_dir_table() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"] == list(TABLE)


def test_every_folder_of_the_table_is_a_package_on_disk() -> None:
    assert [path for path in TABLE.values() if not (CHECKOUT / path / "__init__.py").is_file()] == []


def test_every_package_on_disk_is_in_the_table() -> None:
    tops = [p.parent for p in CHECKOUT.glob("*/__init__.py") if p.parent.name != "tests"]
    inner = [p.parent for path in TABLE.values() for p in (CHECKOUT / path).rglob("*.py")]
    assert {p.relative_to(CHECKOUT).as_posix() for p in [*tops, *inner]} == set(TABLE.values())


@pytest.mark.parametrize("package", TABLE)
def test_every_source_file_is_installed(package: str) -> None:
    on_disk = {p.name for p in (CHECKOUT / TABLE[package]).glob("*.py")}
    assert {p.name for p in installed_folder(package).glob("*.py")} == on_disk


@pytest.mark.parametrize("package", PROJECT["tool"]["setuptools"]["package-data"])
def test_every_data_file_of_the_table_is_installed(package: str) -> None:
    for pattern in PROJECT["tool"]["setuptools"]["package-data"][package]:
        on_disk = {p.name for p in (CHECKOUT / TABLE[package]).glob(pattern)}
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
