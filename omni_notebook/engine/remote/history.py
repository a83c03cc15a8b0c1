"""A server's own history, as it told it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.engine.history import LIMIT, Filter, History, PastAck, moment
from omni_notebook.engine.remote.servers import OMNI, unread
from omni_notebook.errors import ArgumentError, ServerLostError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator

    from omni_notebook.engine.remote.line import Line

MOST = 10_000
"""So many ACKs a server tells at once."""


class _Told(msgspec.Struct):
    path: str
    complete: bool
    any: bool
    acks: list[PastAck]


class HistoryThere(History):
    """`History` of a ledger on a server's machine: what came, of which `newest` are shown; nothing is read later.

    Args:
        told: what the server answered.
        url: where that was.
        wanted: what was asked for.
    """

    def __init__(self, told: _Told, url: str, wanted: Filter) -> None:
        self.path, self.wanted = Path(told.path), wanted
        self.url = url
        self._all = told.acks
        self._told_all = told.complete
        self._newest_id = int(told.any)
        self.newest = told.acks[: wanted.limit or LIMIT]
        self.complete = told.complete and len(self.newest) == len(told.acks)

    @property
    def place(self) -> str:
        """Where it is kept, for people."""
        return f"{self.path} at {self.url}"

    @property
    def title(self) -> str:
        """How many, of which there are more; those that a server does not tell at once are said to be there."""
        title = super().title
        if self._told_all or self.wanted.limit:
            return title
        return f"{title.removesuffix('all')}the newest {MOST:,}; --since and --stage reach those before"

    def __iter__(self) -> Iterator[PastAck]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


async def asked(line: Line, limit: int | None, **wanted: Any) -> HistoryThere:
    """The ACKs that a server's ledger has.

    Raises:
        ArgumentError: an argument is wrong.
        LedgerError: no history is kept there, or it can not be read.
        ServerLostError: the server does not answer.
    """
    there = {key: value for key, value in wanted.items() if value is not None and value is not False}
    answer = await line.get(f"{OMNI}/history", limit=min(limit or MOST, MOST), **there)
    try:
        told = msgspec.json.decode(answer.content, type=_Told)
    except msgspec.DecodeError as error:
        raise ServerLostError(unread(line, "history", error)) from None
    return HistoryThere(told, line.address.url, Filter(limit=limit))


def checked(
    stage: Any, rank: Any, since: str | dt.date | dt.timedelta | float | None, session: Any, errors: Any, limit: Any
) -> dict[str, Any]:
    """What goes over the wire; a time is this machine's.

    Raises:
        ArgumentError: an argument is wrong; nothing was asked.
    """
    after = None if since is None else moment(since)
    number = None if session == "this" else session
    Filter(stage=stage, rank=rank, since=after, session=number, errors=errors, limit=limit).checked()
    if not isinstance(errors, bool):
        msg = f"errors={errors!r} is neither True nor False; nothing was read"
        raise ArgumentError(msg)
    return {"stage": stage, "rank": rank, "since": after, "session": session, "errors": errors, "limit": limit}
