"""What the documentation names exists: links, files, tests, commands, modules. Its Python blocks compile, or run."""

import importlib
import re
import shlex
from pathlib import Path
from unittest.mock import patch

import pytest

import fp4ext
from fp4ext import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# The changelog also has names of the past.
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
# Pages whose blocks run one after the other, as a reader would run them.
RUNNABLE = ["README.md", "docs/quickstart.md", "docs/concepts.md", "docs/scaling.md"]


def of_pages(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda p: str(p.relative_to(ROOT)))


@of_pages(PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), link


@of_pages(PAGES)
def test_tests_that_are_named_exist(page):
    for path, name in re.findall(r"`(?:pytest )?(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
        assert (ROOT / path).exists(), path
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


@of_pages(PRESENT)
def test_files_that_are_named_exist(page):
    roots = "fp4ext|csrc|tests|docs|benchmarks|examples|cmake"
    for path in re.findall(rf"`(?:python )?((?:{roots})/[\w/.]*\w)", page.read_text()):
        assert (ROOT / path).exists(), path


def prose(page):
    """Lines outside of code and tables."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.lstrip().startswith(("|", "```", "![")):
            yield number, line


@of_pages(PAGES)
def test_lines_are_of_120_columns(page):
    if page.parent.name == "measured":  # written by programs
        return
    wide = [number for number, line in prose(page) if len(line) > 120 and " " in line[100:]]
    assert not wide, wide


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


@of_pages(PAGES)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("name", RUNNABLE)
def test_python_blocks_run(name):
    found = blocks(ROOT / name, "python")
    assert found
    names = {}
    for block in found:
        exec(compile(block, name, "exec"), names)


class Parsed(Exception):
    """The command line was understood."""


def parse(words):
    """Raise Parsed where the command exists and takes these options, SystemExit where it does not."""
    whole = cli.Parser.parse_args

    def parse_only(self, argv=None):
        raise Parsed(whole(self, argv))

    with patch.object(cli.Parser, "parse_args", parse_only):
        cli.main(words)


def commands(page):
    """The words after each `python -m fp4ext` of a page."""
    text = page.read_text()
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]*)`", prose)]
    for line in lines:
        for command in re.findall(r"python -m fp4ext ([^;|&]*)", line):
            yield shlex.split(command.replace("$S", "0"), comments=True)


@of_pages(PRESENT)
def test_commands_parse(page):
    for words in commands(page):
        if len(words) == 1:  # a command's name; what it needs may be left out
            words = [*words, "--help"]
        with pytest.raises((Parsed, SystemExit)) as ended:
            parse(words)
        assert ended.type is Parsed or ended.value.code == 0, words


def test_a_command_that_does_not_exist_is_seen():
    for words in (["pretrain", "--polices", "bf16"], ["train"]):
        with pytest.raises(SystemExit):
            parse(words)


@of_pages(PRESENT)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(), re.M)
    assert set(named) <= targets


def find(dotted):
    """The object of a dotted name; AttributeError where there is none."""
    thing = fp4ext
    for part in dotted.split(".")[1:]:
        if not hasattr(thing, part):
            importlib.import_module(f"{thing.__name__}.{part}")
        thing = getattr(thing, part)
    return thing


@of_pages(PRESENT)
def test_names_exist(page):
    for name in re.findall(r"(?<![\w/.])fp4ext(?:\.[A-Za-z_]\w*)+", page.read_text()):
        if name != "fp4ext.json":  # a file of an export
            find(name)


def test_tables_are_complete():
    concepts, interchange = ((ROOT / "docs" / name).read_text() for name in ("concepts.md", "interchange.md"))
    for name in fp4ext.policies.names():
        assert f"| `{name}` |" in concepts, name
    for name in fp4ext.export.LAYOUTS:
        assert f"| `{name}` |" in interchange, name
    for package in ("policy", "functional", "nn", "conversion", "distributed", "export", "audit", "train"):
        reference = (ROOT / "docs" / "api" / f"{package}.md").read_text()
        for name in importlib.import_module(f"fp4ext.{package}").__all__:
            if name not in ("LAYOUTS", "PRESETS", "set_draw_rank"):
                assert re.search(rf"^::: fp4ext\.{package}\.{name}$", reference, re.M), f"{package}.{name}"
