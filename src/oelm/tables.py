"""Tables on the terminal, all of one look."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table


def fitting(widths: Mapping[str, int], dispensable: Iterable[str], width: int) -> list[str]:
    """The columns to show: where all do not fit into `width`, without as many of the `dispensable` as it takes."""
    kept = dict(widths)
    for heading in dispensable:
        if sum(kept.values()) + 2 * len(kept) <= width:
            break
        kept.pop(heading, None)
    return list(kept)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]] = (), words: int = 1, wrap: bool = True) -> Table:
    """Without lines; the first `words` columns hold words, the others numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="left" if i < words else "right", no_wrap=not wrap)
    for row in rows:
        made.add_row(*row)
    return made
