"""Tables for people: Markdown whose columns line up in a terminal too."""


def aligned(rows: list[list[str]]) -> str:
    """The rows as a Markdown table, the first as its head, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
