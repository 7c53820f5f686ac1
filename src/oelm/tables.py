"""Tables on the terminal, all of one look."""

from collections.abc import Iterable, Sequence

from rich.table import Table


def table(headings: Sequence[str], rows: Iterable[Sequence[str]] = (), words: int = 1, wrap: bool = True) -> Table:
    """Without lines; the first `words` columns hold words, the others numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="left" if i < words else "right", no_wrap=not wrap)
    for row in rows:
        made.add_row(*row)
    return made
