"""What a served engine is called: one name from its start to its end, through whichever servers."""

from __future__ import annotations

import os
import socket
import uuid
from typing import TYPE_CHECKING
from urllib.parse import quote
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from omni_notebook.verbs.engine_api import Engine

_names: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()


def name_of(engine: Engine) -> str:
    """`PID.RANDOM@HOST` in ASCII; a process may start engines one after the other, and its number comes again."""
    return _names.setdefault(engine, f"{os.getpid()}.{uuid.uuid4().hex[:8]}@{quote(socket.gethostname())}")
