"""Markdown (GitHub's), with the figures as files beside it."""

import re
from collections.abc import Iterator

from oelm.report.blocks import Block, Code, Document, Figure, Heading, Items, Notice, PageBreak, Table, Text


def render(document: Document, figure_files: list[str]) -> str:
    """`figure_files` are the paths of the document's figures, in their order."""
    names = iter(figure_files)
    lines = [f"# {plain(document.title)}", plain(document.subtitle)]
    lines += [_block(block, names) for block in document.blocks]
    return "\n\n".join(lines) + "\n"


def _block(block: Block, names: Iterator[str]) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {plain(text)}"
        case Text(text, strong):
            return f"**{plain(text)}**" if strong else plain(text)
        case Notice(text):
            return f"> {plain(text)}"
        case Items(items):
            return "\n".join(f"- {plain(item)}" for item in items)
        case Table(headings, rows, caption):
            title = f"{plain(caption)}\n\n" if caption else ""
            table = [headings, ["---"] * len(headings), *rows]
            cells = [[cell if i == 1 else plain(cell) for cell in row] for i, row in enumerate(table)]
            return title + "\n".join("| " + " | ".join(row) + " |" for row in cells)
        case Figure(_, caption):
            return f"![{plain(caption)}]({next(names)})"
        case Code(text):
            longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}\n{text}\n{fence}"
        case PageBreak():
            return "---"


def plain(text: str) -> str:
    """Text that no Markdown reader takes for markup."""
    text = re.sub(r"\s*[\r\n]+\s*", " ", text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_{}\[\]|~$])", r"\\\1", text)
    return re.sub(r"^(\s*)([#+=-]|\d+[.)])(?=\s|$)", r"\1\\\2", text)
