"""What is kept of an audit beside its numbers: pictures, and an entry in the engine's ledger."""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import TYPE_CHECKING

from omni_notebook.errors import OmniError
from omni_notebook.verbs.auditing.outputs import difference_png

if TYPE_CHECKING:
    from omni_notebook.verbs.auditing.outputs import Made
    from omni_notebook.verbs.auditing.result import AuditResult
    from omni_notebook.verbs.engine_api import Engine

RECORD_S = 5.0


def pictures(golden: Made | None, last: Made | None) -> dict[str, list[bytes]]:
    """PNG files: the images before the sleep, those after the last wake, and where the two differ, if they do."""
    if golden is None or last is None:
        return {} if golden is None else _named(before_the_sleep=golden.png)
    differ = difference_png(last.images, golden.images)
    return _named(before_the_sleep=golden.png, after_the_wake=last.png, the_difference_brightened=differ)


def _named(**files: list[bytes]) -> dict[str, list[bytes]]:
    return {name.replace("_", " "): list(some) for name, some in files.items() if some}


def put_on_record(engine: Engine, result: AuditResult) -> None:
    """Into the engine's ledger, where it keeps one; an audit without history is an audit all the same."""
    record_audit = getattr(engine, "record_audit", None)
    if record_audit is not None:
        with contextlib.suppress(OmniError, TimeoutError, concurrent.futures.CancelledError):
            engine.submit(record_audit(result.verdict, result.to_dict())).result(RECORD_S)
