"""`PTable`: a table as text."""

from __future__ import annotations

__all__ = ["PTable", "Row"]


class Row:
    """A row of a table, and a table of annotations below it."""

    def __init__(self, columns: list[str]) -> None:
        self._columns = columns
        self._annotation_table: PTable | None = None

    def append_annotation_table(self, table: PTable) -> None:
        """Adds a table below the row."""
        self._annotation_table = table


class PTable:
    """A table as text, with columns as wide as their widest cell.

    Example::

        table = PTable()
        table.add_row(["Plan 1", "ON"])
        print(table.get_string())
    """

    def __init__(self, sortable: bool = False) -> None:
        self._rows: list[Row] = []
        self._sortable = sortable

    def add_row(self, columns: list[str]) -> Row:
        """Adds a row."""
        self._rows.append(Row(list(columns)))
        return self._rows[-1]

    def get_string(
        self, first_column_width: int | None = None, second_column_width: int | None = None
    ) -> str:
        """Returns the table, a line for each row. The first two columns may be wider."""
        rows = self._rows
        if self._sortable:
            rows = sorted(rows, key=lambda row: row._columns)
        count = max((len(row._columns) for row in rows), default=0)
        cells = [[str(cell) for cell in row._columns] for row in rows]
        widths = [max(len(row[at]) for row in cells if at < len(row)) for at in range(count)]
        for at, least in enumerate((first_column_width, second_column_width)):
            if least is not None and at < count:
                widths[at] = max(widths[at], least)
        text = ""
        for row, line in zip(rows, cells, strict=True):
            text += "".join(cell.ljust(width + 2) for cell, width in zip(line, widths)) + "\n"
            if row._annotation_table is not None:
                text += row._annotation_table.get_string(*widths[:2])
        return text
