"""Code of the documentation's pages."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Block(NamedTuple):
    """Code of a page."""

    code: str
    warns: bool  # that a fit did not converge: says so by the tag "warns"


def blocks(page: str) -> list[Block]:
    """Code of a page in the order of the page: of plain pages, and cells of those run at build."""
    found = re.findall(
        r"^```(?:python|\{code-cell\} python)\n((?::[^\n]*\n)*)(.*?)^```",
        page,
        flags=re.DOTALL | re.MULTILINE,
    )
    return [Block(code.strip("\n") + "\n", "warns" in options) for options, code in found]
