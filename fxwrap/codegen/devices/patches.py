"""Patches of attributes and of table entries, which the end of a context takes back."""

from __future__ import annotations

import contextlib
from typing import Any

_MISSING = object()


class Patches(contextlib.ExitStack):
    """Attributes and table entries that have another value until the context ends."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.callback(lambda: delattr(owner, name) if before is _MISSING else setattr(owner, name, before))

    def put_entry(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        before = table.get(key, _MISSING)
        table[key] = value
        self.callback(lambda: table.pop(key, None) if before is _MISSING else table.update({key: before}))
