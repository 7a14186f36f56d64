"""Which versions of PyTorch Partway says that it is tested with."""

import subprocess
import sys
import warnings
from importlib import metadata
from importlib.metadata import requires

import pytest
import torch

from partway import UntestedTorchWarning, versions
from partway.versions import NEWEST, OLDEST, warn_if_untested


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0+cu132", "2.15.1a0+git1234"])
def test_a_supported_version_is_no_matter(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version)


@pytest.mark.parametrize(("version", "age"), [("2.16.0", "newer"), ("3.0.0.dev20270101", "newer"), ("2.10.1", "older")])
def test_another_version_is_a_warning_that_names_the_range(version, age):
    words = f"PyTorch {version} is {age} than the versions that Partway is tested with, 2.11 to 2.15"
    with pytest.warns(UntestedTorchWarning, match=words.replace(".", r"\.")) as seen:
        warn_if_untested(version)
    assert "pip install 'torch==2.15.*'" in str(seen[0].message)


def test_the_warning_stands_before_an_import_that_fails():
    """A later PyTorch may have dropped what Partway imports."""
    text = (
        "import torch; del torch.export\n"
        "import sys; sys.modules['torch.export'] = None\n"
        "from importlib import metadata; metadata.version = lambda name: '2.99.0'\n"
        "import partway\npartway.shard"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "UntestedTorchWarning: PyTorch 2.99.0 is newer" in found.stderr
    assert found.stderr.index("UntestedTorchWarning") < found.stderr.index("Traceback")


def test_a_torch_that_was_not_installed_says_its_version_itself(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    assert versions.installed_torch() == metadata.version("torch")
    monkeypatch.setattr(versions, "version", missing)
    assert versions.installed_torch() == torch.__version__


def test_without_a_torch_nothing_is_warned_of(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    assert versions.installed_torch() is None
    versions.warn_if_untested(None)


def test_the_oldest_version_is_that_of_the_package():
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in (requires("partway") or [])
    assert OLDEST < NEWEST
