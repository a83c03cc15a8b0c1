"""Write the JSON schema of an audit's file from its types: `python tools/audit_schema.py`."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from omni_notebook.verbs.auditing.record import Record
from omni_notebook.verbs.auditing.result import SCHEMA


def schema() -> dict[str, Any]:
    """The schema, JSON Schema 2020-12."""
    made = msgspec.json.schema(Record)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "An audit of omni_notebook", **made}


def text() -> str:
    """The file's contents."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
