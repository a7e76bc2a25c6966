"""The built site: links lead somewhere, and nothing is cut on a phone or a desktop.

These read docs/_build/html, which ``make docs`` makes. Chromium measures widths, by playwright:
``pip install playwright``; they are left out where one of the two is missing.
"""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from support.documentation import DOCS

pytestmark = pytest.mark.slow
SITE = DOCS / "_build" / "html"
PAGES = sorted(SITE.glob("*.html"))
# Width in pixels of a phone and of a desktop.
WIDTHS = (390, 1280)
# What stands out of the window and cannot be scrolled to, and formulas that failed.
CUT = """() => {
  const width = document.documentElement.clientWidth, found = [];
  for (const element of document.querySelectorAll('article *')) {
    const box = element.getBoundingClientRect();
    if (box.width === 0 || box.right <= width + 1) continue;
    let around = element;
    while (around && around.tagName !== 'ARTICLE'
        && !['auto', 'scroll', 'hidden'].includes(getComputedStyle(around).overflowX))
      around = around.parentElement;
    if (!around || around.tagName === 'ARTICLE') found.push(element.textContent.slice(0, 60));
  }
  for (const error of document.querySelectorAll('mjx-merror')) found.push(error.textContent);
  return found;
}"""


class Links(HTMLParser):
    """Targets and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.targets.add(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site():
    if not PAGES:
        pytest.skip("no built pages: run make docs")
    return {path.name: Links(path) for path in PAGES}


def test_links_lead_somewhere(site):
    dead = []
    for page, links in site.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            place = unquote(url.path) or page
            anchor = unquote(url.fragment)
            if not (SITE / place).exists() or (
                anchor and place in site and anchor not in site[place].anchors
            ):
                dead.append(f"{page}: {target}")
    assert not dead


def test_formulas_need_no_network(site):
    """No script or style sheet is fetched from elsewhere."""
    for path in PAGES:
        assert not re.findall(
            r"<(?:script|link)[^>]*(?:src|stylesheet[^>]*href)=\"https?:", path.read_text()
        )


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut(site, width):
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium")
    cut = {}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        for path in PAGES:
            page.goto(path.as_uri())
            # Formulas are typeset when all else is done.
            page.evaluate("() => window.MathJax?.startup?.promise")
            found = page.evaluate(CUT)
            if found or page.evaluate("() => document.documentElement.scrollWidth") > width:
                cut[path.name] = found
        browser.close()
    assert not cut
