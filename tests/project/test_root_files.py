"""What lies at the root for people and for the repository's host: citation, workflow, issue forms."""

from __future__ import annotations

import ast
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")

# Of the Citation File Format 1.2.0, what we use: the keys it knows, and those that it demands.
KNOWN = {
    "root": {"abstract", "authors", "cff-version", "keywords", "license", "message", "references", "title", "type"}
    | {"version"},
    "reference": {"authors", "conference", "notes", "title", "type", "year"},
}
DEMANDED = {"root": {"authors", "cff-version", "message", "title"}, "reference": {"authors", "title", "type"}}
TYPES = {"conference-paper", "generic", "unpublished"}
PAPERS = {"fedacs": "FedACS", "fedamp": "FedAMP", "flame": "FLAME", "fedpg": "FedPG"}


def test_the_citation_is_in_its_format() -> None:
    assert DEMANDED["root"] <= CITATION.keys() <= KNOWN["root"]
    assert CITATION["cff-version"] == "1.2.0" and CITATION["type"] == "software"
    for reference in CITATION["references"]:
        assert DEMANDED["reference"] <= reference.keys() <= KNOWN["reference"], reference["title"]
        assert reference["type"] in TYPES and isinstance(reference.get("year", 0), int)
        assert set(reference.get("conference", {"name": ""})) == {"name"}
    for people in (CITATION["authors"], *(reference["authors"] for reference in CITATION["references"])):
        assert people and all(set(person) in ({"name"}, {"family-names"}) for person in people)


def test_the_citation_is_of_this_project() -> None:
    assert (CITATION["version"], CITATION["license"]) == (PROJECT["version"], PROJECT["license"])
    assert CITATION["title"].lower() == PROJECT["name"] and CITATION["keywords"] == PROJECT["keywords"]


@pytest.mark.parametrize("method", PAPERS)
def test_the_papers_are_cited_as_their_methods_cite_them(method: str) -> None:
    module = ast.parse((ROOT / f"src/coterie/algorithms/{method}.py").read_text(encoding="utf-8"))
    said = " ".join((ast.get_docstring(module) or "").split())
    (reference,) = [each for each in CITATION["references"] if each["notes"].startswith(PAPERS[method])]
    assert f'"{reference["title"]}"' in said
    family = [person["family-names"] for person in reference["authors"] if "family-names" in person]
    assert not family or f"{', '.join(family[:-1])} and {family[-1]}, " in said
    if "conference" in reference:
        assert f", {reference['conference']['name']}." in said
    if "year" in reference:
        assert str(reference["year"]) in said


def test_the_workflow_runs_what_people_run() -> None:
    (job,) = WORKFLOW["jobs"].values()
    assert job["runs-on"].startswith("ubuntu") and 0 < job["timeout-minutes"] <= 60
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    (python,) = [step["with"] for step in job["steps"] if "python-version" in step.get("with", {})]
    assert f">={python['python-version']}" == PROJECT["requires-python"] and python["cache"] == "pip"
    assert all((ROOT / name).exists() for name in python["cache-dependency-path"].split())
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} <= WORKFLOW[True].keys()  # YAML reads the key "on" as a truth value


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_ask_something(form: Path) -> None:
    found = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert found["name"] and found["description"]
    asked = [each for each in found["body"] if each["type"] != "markdown"]
    assert any(each.get("validations", {}).get("required") for each in asked)
    assert len({each["id"] for each in asked}) == len(asked)
    for each in asked:
        assert each["type"] in ("input", "textarea", "checkboxes") and each["attributes"]["label"]


def test_there_is_a_form_for_each_kind() -> None:
    assert [form.stem for form in FORMS] == ["bug", "method", "question"]
    assert (ROOT / ".github/pull_request_template.md").is_file()


def test_what_make_quick_runs_is_there() -> None:
    from tests import conftest
    from tests.conformance_table import TABLE

    assert [name for name in conftest.QUICK if not (ROOT / "tests" / name).exists()] == []
    assert set(conftest.QUICK_METHODS) <= TABLE.keys()
