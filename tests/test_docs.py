"""The code on the pages of the documentation runs as it is written."""

import re
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    path
    for path in sorted(DOCS.glob("*.md"))
    if "```python" in path.read_text() and path.name != "index.md"
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_code_of_a_page(page):
    """All blocks of a page in one namespace, as a reader would paste them."""
    names = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
        # A fit on a page is one that works.
        if "result" in names:
            assert np.isfinite(names["result"].losses[-1])
