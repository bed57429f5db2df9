"""Hooks of mkdocs.yml: anchors as GitHub makes them, and links that leave docs/ as the name of the file.

The plugin `offline` adds a script of another host (search in a page opened from disk needs it); every such script is
taken out again.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def slug(heading: str, _separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def on_config(config):
    config["mdx_configs"]["toc"] = {"slugify": slug, "permalink": True}
    return config


def on_page_markdown(markdown: str, page, **_):
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def outside(link: re.Match[str]) -> str:
        file = (folder / link[2]).resolve()
        return link[0] if file.is_relative_to(ROOT / "docs") else f"{link[1]} (`{file.relative_to(ROOT)}`)"

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)#\s]*)[^)]*\)", outside, markdown)


def in_cell(cell: re.Match[str]) -> str:
    """A cell of a table whose names in code may break after a dot, a slash or an underscore, and nowhere else."""

    def name(text: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([._/])(?=\w)", r"\1<wbr>", text[0]) if len(text[0]) > 16 else text[0]

    return re.sub(r"(?<=<code>)[^<]+(?=</code>)", name, cell[0])


def on_post_page(output: str, **_):
    local = re.sub(r"""<script[^>]*\bsrc=["']?https://[^>]*></script>""", "", output)
    return re.sub(r"<td\b[^>]*>.*?</td>", in_cell, local)


def on_post_template(output_content: str, **_):
    return on_post_page(output_content)
