"""The three sets of versions: within the bounds of pyproject.toml, the oldest at them, and told as they are."""

import re
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.tiny_runs import REPOSITORY

SETS = {"oldest": "constraints-oldest.txt", "pinned": "constraints.txt", "newest": "constraints-newest.txt"}


def pins(name: str) -> dict[str, Version]:
    lines = (REPOSITORY / SETS[name]).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {package.lower(): Version(number) for package, number in pairs}


def is_installed(name: str) -> bool:
    """Whether the tests run with the libraries of a set."""
    return all(pins(name)[library] == Version(version(library)) for library in ("trl", "transformers", "peft"))


PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ASKED = {r.name.lower(): r.specifier for r in map(Requirement, PROJECT["dependencies"])}


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_within_the_bounds(name):
    for package, bounds in ASKED.items():
        assert pins(name)[package] in bounds, package


def test_the_oldest_set_is_the_lower_bounds_and_nothing_else():
    lowest = {package: Version(re.search(r">=([\d.]+)", str(bounds)).group(1)) for package, bounds in ASKED.items()}
    assert pins("oldest") == lowest


def test_no_bound_lets_in_more_than_has_been_run():
    """Where private parts are used, the next minor version is refused until the tests have run with it."""
    for package in ("transformers", "trl", "peft"):
        newest = pins("newest")[package]
        assert f"{newest.major}.{newest.minor + 1}" not in ASKED[package], package


def test_the_page_tells_the_versions_of_each_set():
    page = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
    for package in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes"):
        assert f"| {package} | {' | '.join(str(pins(name)[package]) for name in SETS)} |" in page
