"""A report as plain blocks: said once, rendered as HTML, Markdown and typst, where each renderer escapes all text."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str
    strong: bool = False


@dataclass(frozen=True)
class Notice:
    """A paragraph that must not be overlooked."""

    text: str


@dataclass(frozen=True)
class Items:
    items: list[str]


@dataclass(frozen=True)
class Table:
    headings: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    svg: str
    caption: str
    wide: bool = True


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class PageBreak:
    """A run's page begins."""


Block = Heading | Text | Notice | Items | Table | Figure | Code | PageBreak


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    language: str
    verdict: str
    """PASS, FAIL or INCONCLUSIVE, for the colour; "" without one."""
    contents: str
    """What the table of contents is called."""
    blocks: list[Block] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        return (block for block in self.blocks if isinstance(block, Figure))
