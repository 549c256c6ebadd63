"""What docs name exists: tests, files, and links between pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_that_are_named_exist(page):
    for path, name in re.findall(r"`(?:pytest )?(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
        assert (ROOT / path).exists(), path
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def prose(page):
    """Lines outside of code and tables."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.lstrip().startswith(("|", "```", "![")):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_are_of_120_columns(page):
    if page.name == "tour.md" or page.parent.name == "measured":  # written by programs
        return
    wide = [number for number, line in prose(page) if len(line) > 120 and " " in line[100:]]
    assert not wide, wide


def test_the_readmes_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(block, "README.md", "exec"), {})
