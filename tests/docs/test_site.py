"""The pages hold together: links lead somewhere, pictures are there, the site builds strictly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT, name, pages, prose

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """As forges and MkDocs make them of headings."""
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", head.strip().lower())) for head in plain}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page):
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{name(page)}: {target}"
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal.read_text(encoding="utf-8")), f"{name(page)}: {target}"


def test_every_page_is_in_the_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/.-]+\.md", yaml.safe_dump(site["nav"])))
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert there - listed == {page for page in there if page.startswith(("adr/", "log/"))}
    assert listed - there == set()


def test_drawings_are_whole_and_say_what_they_show():
    for drawing in (DOCS / "images").glob("*.svg"):
        root = ElementTree.parse(drawing).getroot()
        title = root.find("{http://www.w3.org/2000/svg}title")
        assert title is not None and title.text, drawing.name
        text = drawing.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""(?:href|src)=|url\((?!#)|@import|=["']http""", text), drawing.name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("needs mkdocs-material: pip install mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    front = (tmp_path / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)', front)
