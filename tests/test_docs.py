# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation: how they begin, and that each can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
WRITTEN_PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
BEGINNING_LINES = 12
README_LINES_BEFORE_OPTIONS = 120
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_a_command_or_a_picture(page: Path) -> None:
    beginning = page.read_text().splitlines()[:BEGINNING_LINES]
    assert any(line.startswith(("```", "![")) for line in beginning)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES, *WRITTEN_PAGES],
    ids=lambda page: f"{page.parent.name}-{page.stem}",
)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [to for to in LINK.findall(page.read_text()) if not (page.parent / to).exists()]
    assert missing == []


def test_all_pages_are_on_the_site_and_in_the_index() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(site)["nav"]
    for page in WRITTEN_PAGES:
        assert f" benchmarks/{page.name}\n" in site
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES:
        assert f" {page.name}\n" in site
        assert page.name == "index.md" or f"({page.name}" in index


def test_the_readme_is_short_before_its_options() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("## Options") < README_LINES_BEFORE_OPTIONS
