"""Every Python block of the docs runs and prints what it says, and every command exists.

- ```` ```python ````: runs, the blocks of a page in one namespace, in order.
- ```` ```text title="prints" ````: what the Python block before it prints, to the letter.
- ```` ``` {.python .notest} ````: does not run; the line before says why, as ``<!-- not run: … -->``.
- ```` ```shell ```` or bash: lines that start with ``undrop`` name commands and options that exist.
"""

import contextlib
import inspect
import io
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from typer.main import get_command

from undrop.engines import ENGINES
from undrop.engines.tangent_rules import TANGENT_RULES
from undrop.lab.cli import app_for, commands, main
from undrop.lab.train import OBJECTIVES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(p for p in DOCS.rglob("*.md") if p.parent.name != "gallery")]
FENCE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.M | re.S
)
SHELL = ("shell", "bash")
PRINTS, NOT_TESTED = 'text title="prints"', "{.python .notest}"  # as the site takes them, too
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, its text, and where it is."""

    info: str
    text: str
    line: int
    before: str

    @property
    def lines(self):
        return [line for line in self.text.splitlines() if line.strip()]


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["info"].strip(),
            dedent(found["body"]),
            text.count("\n", 0, found.start()) + 2,
            text[: found.start()],
        )
        for found in FENCE.finditer(text)
    ]


def pages_with(*infos):
    found = [page for page in PAGES if any(b.info in infos for b in blocks(page))]
    return pytest.mark.parametrize("page", found, ids=lambda p: str(p.relative_to(ROOT)))


REGISTRIES = (TANGENT_RULES._entries, ENGINES._entries, OBJECTIVES._entries, OBJECTIVES.about)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder and one thread; everything a page registers or sets is restored."""
    monkeypatch.chdir(tmp_path)
    kept = [dict(registry) for registry in REGISTRIES]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield tmp_path
    torch.set_num_threads(threads)
    for registry, before in zip(REGISTRIES, kept, strict=True):
        registry.clear()
        registry.update(before)


@pages_with("python")
def test_python_blocks_run_and_print_what_they_say(page, elsewhere):
    namespace = {"__name__": "docs"}
    printed = ""
    for block in blocks(page):
        if block.info == PRINTS:
            assert printed.strip() == block.text.strip(), f"{page.name}:{block.line}"
        if block.info != "python":
            continue
        # Blank lines keep the line numbers of the page, so that tracebacks point there.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        printed = out.getvalue()


def test_blocks_that_do_not_run_are_few_and_say_why():
    left_out = [(page, b) for page in PAGES for b in blocks(page) if b.info == NOT_TESTED]
    assert len(left_out) <= 5
    for page, block in left_out:
        assert NOT_RUN.search(block.before), f"{page.name}:{block.line} does not say why"


def test_every_fence_is_of_a_known_kind():
    """A block with a misspelled kind would silently not run."""
    known = {"", "python", NOT_TESTED, "text", PRINTS, *SHELL, "toml", "json"}
    for page in PAGES:
        for block in blocks(page):
            assert block.info in known, f"{page.name}:{block.line} is {block.info!r}"


def command_lines(page):
    """The calls of undrop in a page's shell blocks, without prompts, pipes and comments."""
    for block in blocks(page):
        if block.info in SHELL:
            text = block.text.replace("\\\n", " ")
            for line in text.splitlines():
                words = shlex.split(line, comments=True)
                if words and Path(words[0]).name == "undrop":
                    yield block.line, words[1:]


@pages_with(*SHELL)
def test_commands_and_their_options_exist(page):
    for line, words in command_lines(page):
        where = f"{page.name}:{line}: undrop {' '.join(words)}"
        assert words[0] in commands() or words[0].startswith("--"), where
        command = get_command(app_for(words[:1]))
        for word in words:
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
            elif word.startswith("-"):
                known = {"--help"}.union(*(p.opts + p.secondary_opts for p in command.params))
                assert word.partition("=")[0] in known, where


def test_the_first_page_takes_at_most_five_commands_and_they_work(elsewhere, capsys, monkeypatch):
    start = blocks(DOCS / "index.md")
    shell = [block for block in start if block.info == "shell"]
    assert sum(len(block.lines) for block in shell) <= 5
    mine = next(block for block in start if block.info == "python")
    Path("mine.py").write_text(mine.text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # other tests have a file of that name
    printed = []
    for _, words in command_lines(DOCS / "index.md"):
        shorter = [
            "2" if before == "--seconds" else word for before, word in pairwise(["", *words])
        ]
        assert main(shorter) == 0
        printed.append(capsys.readouterr().out)
    assert "independent" in printed[0]
    assert "What to do" in printed[1]
    sys.modules.pop("mine")


def test_examples_of_extending_are_under_forty_lines():
    for block in blocks(DOCS / "extending.md"):
        assert len(block.lines) < 40, f"extending.md:{block.line}"


def test_the_readme_is_under_120_lines():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


LOADED = re.compile(
    r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["']?(https?:)?//[^>]*>"""
)


def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path):
    pytest.importorskip("mkdocstrings_handlers.python")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr + built.stdout
    for page in tmp_path.rglob("*.html"):
        loaded = [m[0] for m in LOADED.finditer(page.read_text("utf-8")) if "canonical" not in m[0]]
        assert not loaded, f"{page.name} loads {loaded}"
    for font in re.findall(r"url\(([^)]+)\)", (DOCS / "assets/katex/katex.min.css").read_text()):
        assert (DOCS / "assets/katex" / font).exists()


def documented():
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for place in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M):
            yield pytest.param(place, id=place)


@pytest.mark.parametrize("place", documented())
def test_the_reference_shows_an_example_as_code(place):
    found = pkgutil.resolve_name(place)
    text = inspect.getdoc(found) or ""
    before, sign, _ = text.partition(">>>")
    if sign and (inspect.isclass(found) or inspect.isroutine(found)):
        assert before.rstrip().endswith("Examples:"), "a page shows other examples as quotations"
