"""A table of results as CSV, with numbers that come back as numbers."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kinfolk.runs.files import strict_json


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns are the keys of the rows, in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if columns:
        table.writerow(columns)
    table.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


def from_csv(text: str) -> list[dict[str, Any]]:
    """Numbers as numbers, true and false as booleans, an empty cell as None, the rest as strings."""
    return [
        {column: _value(cell) for column, cell in row.items()} for row in csv.DictReader(io.StringIO(text, newline=""))
    ]


def _cell(value: Any) -> str:
    """Strings as they are, numbers as in JSON, nothing for what is not a finite number."""
    if isinstance(value, str):
        return value
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)
    text = strict_json(value)
    return "" if text == "null" else text


_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,999})((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")  # as JSON writes them
_WORDS = {"true": True, "false": False}


def _value(cell: str | list[str] | None) -> Any:
    if not cell or isinstance(cell, list):  # more cells than columns
        return cell or None
    found = _NUMBER.fullmatch(cell)
    if found is None:
        return _WORDS.get(cell, cell)
    return float(cell) if found[1] else int(cell)
