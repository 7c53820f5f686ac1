"""One self-contained HTML file: no script, nothing loaded, light and dark, prints well."""

import base64
from html import escape
from importlib.resources import files

from oelm.report.blocks import Block, Code, Document, Figure, Heading, Items, Notice, PageBreak, Table, Text

DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    "text { fill: #ddd !important } [style*='stroke: #333333'] { stroke: #bbb !important }"
    "}</style>"
)
"""An <img> sees the reader's colour scheme only through a style of its own."""


def render(document: Document) -> str:
    page = (files("oelm.report") / "page.html").read_text(encoding="utf-8")
    headings = [(i, b) for i, b in enumerate(document.blocks) if isinstance(b, Heading) and b.level == 2]
    parts = {
        "language": escape("zh-Hans" if document.language == "zh" else document.language),
        "title": escape(document.title),
        "subtitle": escape(document.subtitle),
        "verdict": escape(document.verdict.lower()),
        "contents": escape(document.contents),
        "toc": "".join(f'<li><a href="#s{i}">{escape(b.text)}</a></li>' for i, b in headings),
        "body": "\n".join(_block(i, block) for i, block in enumerate(document.blocks)),
    }
    pieces = page.split("@@")  # text @@name@@ text: what is put in is never looked at again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _block(index: int, block: Block) -> str:
    match block:
        case Heading(text, level):
            return f'<h{level} id="s{index}">{escape(text)}</h{level}>'
        case Text(text, strong):
            return f'<p class="lead">{escape(text)}</p>' if strong else f"<p>{escape(text)}</p>"
        case Notice(text):
            return f'<p class="notice" role="note">{escape(text)}</p>'
        case Items(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Table(headings, rows, caption):
            head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
            body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
            title = f"<caption>{escape(caption)}</caption>" if caption else ""
            return (
                f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
            )
        case Figure(svg, caption, wide):
            dark = svg.replace("</svg>", DARK + "</svg>")
            source = "data:image/svg+xml;base64," + base64.b64encode(dark.encode()).decode()
            kind = "" if wide else ' class="small"'
            label = escape(caption, quote=True)
            return (
                f'<figure{kind}><img src="{source}" alt="{label}"><figcaption>{escape(caption)}</figcaption></figure>'
            )
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case PageBreak():
            return '<hr class="page">'


def _cell(text: str) -> str:
    number = text[:1] in "+-−–0123456789" and text[:1] != ""
    return f'<td class="number">{escape(text)}</td>' if number else f"<td>{escape(text)}</td>"
