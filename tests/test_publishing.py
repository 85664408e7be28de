"""What a release consists of besides the code: workflows, the Dockerfile, the paper, the citation."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SECTIONS = [  # that JOSS requires, in its order
    "Summary",
    "Statement of need",
    "State of the field",
    "Software design",
    "Research impact statement",
    "AI usage disclosure",
    "Acknowledgements",
    "References",
]


def read(*path):
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


def test_there_is_a_workflow_for_tests_docs_and_releases():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_of_a_workflow_exists(path):
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.M)
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            command = step.get("run", "")
            assert set(re.findall(r"^make (\S+)", command, re.M)) <= set(targets)
            for script in re.findall(r"python (\S+\.py)", command):
                assert (ROOT / script).is_file()


def test_the_wheel_workflow_covers_every_python_of_the_classifiers():
    matrix = yaml.safe_load(read(".github", "workflows", "tests.yml"))["jobs"]["wheel"]["strategy"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    assert matrix["matrix"]["python"] == named


def test_the_dockerfile_installs_the_pinned_torch_before_anything_else():
    commands = re.findall(r"^RUN (.*)", read("Dockerfile"), re.M)
    assert commands[0] == "pip install --no-cache-dir -c constraints.txt torch numpy"
    assert re.search(r"^torch==", read("constraints.txt"), re.M)
    for name in re.findall(r"^COPY (.*) \S+$", read("Dockerfile"), re.M):
        assert all((ROOT / part).exists() for part in name.split())


def test_the_paper_has_the_sections_and_the_length_that_joss_asks_for():
    _, head, body = read("paper", "paper.md").split("---\n", 2)
    assert {"title", "tags", "authors", "affiliations", "date", "bibliography"} <= set(
        yaml.safe_load(head)
    )
    assert re.findall(r"^# (.*)$", body, re.M) == SECTIONS
    assert 750 <= len(body.split()) <= 1750


def test_the_paper_cites_exactly_what_its_bibliography_has():
    cited = set(re.findall(r"@(\w+)", read("paper", "paper.md").split("---\n", 2)[2]))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", read("paper", "paper.bib"), re.M))


def test_the_citation_names_the_version_of_the_package_and_its_changelog():
    citation = yaml.safe_load(read("CITATION.cff"))
    version = citation["version"]
    assert f'version = "{version}"' in read("pyproject.toml")
    assert f"## [{version}] - {citation['date-released']}" in read("CHANGELOG.md")
