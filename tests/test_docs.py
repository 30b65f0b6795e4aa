"""The documents: each is in the index; links point to a file and a heading, and commands name files, that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import BLOCK, blocks

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "docs" / "README.md"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
DOCUMENTS = PAGES + [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SCRIPT = re.compile(r"(benchmarks|examples|fxwrap|hostcuda|tests)/[\w/]+\.py")


def prose(path: Path) -> str:
    """The text without blocks of code, in which brackets are no links."""
    return BLOCK.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The anchors that a renderer makes of a document's headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue  # another site's
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_point_to_what_exists(path: Path) -> None:
    assert not broken_links(path)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, `code`\n\n```\n# no heading\n```\n")
    text = "[a](there.md) [b](there.md#a-heading-code) [c](gone.md) [d](there.md#no-heading) [e](#own) [f](https://x.y/z)"
    (tmp_path / "page.md").write_text(text)
    assert broken_links(tmp_path / "page.md") == ["gone.md", "there.md#no-heading", "#own"]


def _text(script: str) -> str:
    """A script of the checkout, or of hostsim, which is copied; empty if there is none."""
    paths = [folder / script for folder in (ROOT, ROOT / "examples" / "hostsim")]
    return next((path.read_text() for path in paths if path.exists()), "")


def unknown(text: str) -> list[str]:
    """Scripts, their options, and make's targets that are not there, of commands in prose and in untested blocks."""
    shown = [line.partition("#")[0] for block in blocks(text) if block.untested for line in block.text.splitlines()]
    targets = " ".join(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)).split()
    found = []
    for command in shown + re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        words = command.split()
        scripts = {word: _text(word) for word in words if SCRIPT.fullmatch(word)}
        found += [script for script, text in scripts.items() if not text]
        for option in (word for word in words if word.startswith("--") and any(scripts.values())):
            if not any(f'"{option}"' in text for text in scripts.values()):
                found.append(f"{' '.join(scripts)} {option}")
        if words[:1] == ["make"]:
            found += [f"make {word}" for word in words[1:] if re.fullmatch(r"[a-z-]+", word) and word not in targets]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_run_or_says_why_not(path: Path) -> None:
    """(test_wheel.py runs them.) A mark, or a block, that is written in another way would be passed over."""
    assert not re.findall(r"```.*|~~~.*|<!--.*|\n\n {4,}.*", prose(path))
    for block in blocks(path.read_text()):
        assert block.untested or block.language in ("python", "bash", "text"), block


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_what_exists(path: Path) -> None:
    assert not unknown(path.read_text())


def test_a_command_that_names_nothing_is_found() -> None:
    text = """
`make test`, `make nothing`, `python benchmarks/speed.py --json FILE`, `python tests/fuzz/sweep.py --nothing 1`

<!-- untested: minutes -->
```bash
python examples/nothing.py  # tests/nothing.py
```
"""
    assert unknown(text) == ["examples/nothing.py", "make nothing", "tests/fuzz/sweep.py --nothing"]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_every_document_is_in_the_index(path: Path) -> None:
    assert path == INDEX or f"]({path.name})" in INDEX.read_text()


def test_the_readme_is_short() -> None:
    """A first page; what is longer stands in docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_linters_have_one_version() -> None:
    """Before a commit and in `make lint`."""
    pins = dict(re.findall(r"^(\w+)==(.*)$", (ROOT / "constraints" / "common.txt").read_text(), re.MULTILINE))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = re.findall(r"\[(\w+)==([\d.]+)\]", hooks)
    assert len(pinned) == 2 and all(pins[name] == version for name, version in pinned)


def test_every_torch_of_the_ci_has_constraints() -> None:
    """And every file of constraints is for a torch that the package allows."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "make demo" in workflow and "make test" in workflow and "make lint" in workflow
    versions = re.findall(r'"(\d+\.\d+\.\d+)"', workflow)
    assert versions and all((ROOT / "constraints" / f"torch-{version}.txt").exists() for version in versions)
    low, high = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    held = {int(path.stem.split(".")[1]) for path in (ROOT / "constraints").glob("torch-*.txt")}
    assert held == set(range(int(low), int(high)))
