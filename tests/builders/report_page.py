"""What tests of the report share: its words, its elements."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

Results = dict[str, Any]


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of each table by its id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, str] = {}
        self._table: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._table = dict(attrs)["id"]

    def handle_endtag(self, tag: str) -> None:
        self._table = None if tag == "table" else self._table

    def handle_data(self, data: str) -> None:
        if self._table is not None:
            self.tables[self._table] = self.tables.get(self._table, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]
