"""PDF through typst. All text goes in as string literals, so none of it is markup."""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oelm.errors import UserError
from oelm.report.blocks import Block, Code, Document, Figure, Heading, Items, Notice, PageBreak, Table, Text

CJK_FONTS = (
    "Noto Sans CJK SC", "Source Han Sans SC", "Source Han Sans CN", "Noto Sans SC", "Microsoft YaHei", "PingFang SC",
    "Hiragino Sans GB", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "SimHei", "SimSun", "Droid Sans Fallback",
)  # fmt: skip
LATIN_FONTS = ("Noto Sans", "Helvetica Neue", "Segoe UI", "DejaVu Sans", "Liberation Sans", "Libertinus Serif")
HEAD = """\
#set page(paper: "a4", margin: (x: 1.8cm, y: 2cm), numbering: "1 / 1")
#set text(font: {fonts}, lang: "{language}", size: 10pt)
#set par(justify: false, leading: 0.65em)
#set table(stroke: (x: none, y: 0.4pt + luma(200)), inset: (x: 3pt, y: 3.5pt))
#show heading.where(level: 2): set block(above: 1.6em, below: 0.8em)
#show table: set text(size: 7.5pt)
#show raw: set text(font: {mono}, size: 8pt)
#show figure.caption: set text(size: 8.5pt, fill: luma(90))
"""


def render_pdf(document: Document) -> bytes:
    """Compile to PDF; a Chinese document without a Chinese font is refused, with the remedy."""
    import typst

    families = set(typst.Fonts().families())
    fonts = [font for font in LATIN_FONTS if font in families][:1]
    chinese = [font for font in CJK_FONTS if font in families][:1]
    if document.language == "zh" and not chinese:
        raise UserError(
            "the PDF needs a Chinese font and this machine has none: install one (Debian, Ubuntu: apt install "
            "fonts-noto-cjk; no rights: put NotoSansCJKsc-Regular.otf into ~/.local/share/fonts) or take --format html"
        )
    with tempfile.TemporaryDirectory() as place:
        for i, figure in enumerate(document.figures()):
            (Path(place) / f"{i}.svg").write_text(figure.svg, encoding="utf-8")
        main = Path(place) / "report.typ"
        main.write_text(source(document, fonts + chinese), encoding="utf-8")
        return typst.compile(str(main))


def source(document: Document, fonts: list[str]) -> str:
    """The typst text; figures are the files 0.svg, 1.svg, …"""
    mono = ["DejaVu Sans Mono", *fonts]
    head = HEAD.format(fonts=_array(fonts), mono=_array(mono), language="zh" if document.language == "zh" else "en")
    numbers = itertools.count()
    lines = [f"#heading(level: 1, {quote(document.title)})", f"#text(fill: luma(90), {quote(document.subtitle)})"]
    return head + "\n\n".join([*lines, *(_block(block, numbers) for block in document.blocks)]) + "\n"


def _block(block: Block, numbers: Iterator[int]) -> str:
    match block:
        case Heading(text, level):
            return f"#heading(level: {level}, {quote(text)})"
        case Text(text, strong):
            return f"#text({'weight: 600, size: 11.5pt, ' if strong else ''}{quote(text)})"
        case Notice(text):
            return f"#block(stroke: 0.8pt + orange, inset: 8pt, radius: 3pt, width: 100%, {quote(text)})"
        case Items(items):
            return f"#list({', '.join(quote(item) for item in items)})"
        case Table(headings, rows, caption):
            head = ", ".join(f"strong({quote(heading)})" for heading in headings)
            cells = "".join(", " + quote(cell) for row in rows for cell in row)
            title = f"#text(size: 8.5pt, fill: luma(90), {quote(caption)})\n\n" if caption else ""
            return f"{title}#table(columns: {len(headings)}, table.header({head}){cells})"
        case Figure(_, caption, wide):
            width = "100%" if wide else "55%"
            image = f'image("{next(numbers)}.svg", width: {width})'
            return f"#figure({image}, numbering: none, supplement: none, caption: {quote(caption)})"
        case Code(text):
            return f"#block(fill: luma(244), inset: 7pt, radius: 3pt, width: 100%, raw({quote(text)}))"
        case PageBreak():
            return "#pagebreak(weak: true)"


def quote(text: str) -> str:
    """A typst string literal."""
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "").replace("\t", "    ")
    )
    shown = "".join(c if c.isprintable() or c == " " else "\ufffd" for c in escaped)
    return f'"{shown}"'


def _array(fonts: list[str]) -> str:
    return "(" + ", ".join(json.dumps(font) for font in fonts) + ",)"
