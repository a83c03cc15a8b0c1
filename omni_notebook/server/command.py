"""A server for a process's whole life."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from omni_notebook.errors import UnsupportedError
from omni_notebook.memory.libc import limit_heaps
from omni_notebook.server import words
from omni_notebook.server.settings import ServerSettings
from omni_notebook.verbs import engines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from types import FrameType

INTERRUPTED = 130
_OURS = frozenset(
    {
        *("model", "named_model", "omni", "enable_sleep_mode", "engine"),
        *("host", "port", "api_key", "served_model_names", "allowed_hosts"),
    }
)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT (130) or SIGTERM (0).

    Raises:
        ArgumentError, ConfigError: bad input or a taken address; nothing was started.
        UnsupportedError: the server's libraries are not installed.
    """
    model = words.model_of(args)
    settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        served_model_names=tuple(args.served_model_names),
        allowed_hosts=tuple(args.allowed_hosts),
    )
    limit_heaps()
    options = {key: value for key, value in vars(args).items() if key not in _OURS}
    if args.engine != engines.EMBEDDED:
        engines.check(args.engine, model, options)  # the embedded one's checks are its constructor's
    with _told_to_stop() as told:
        try:
            _serve(settings, told, args.engine, model, {**options, "enable_sleep_mode": args.enable_sleep_mode})
        except _ToldError:
            _say("ended before the engine was ready; what was started has been stopped")
    return INTERRUPTED if told.number == signal.SIGINT else 0


def _serve(settings: ServerSettings, told: _Told, kind: str, model: str, options: dict[str, Any]) -> None:
    try:
        from omni_notebook.server import serving  # noqa: PLC0415  (an extra)
    except ImportError as error:
        msg = f"the server needs {error.name}: pip install 'omni-notebook[server]'. Nothing was started"
        raise UnsupportedError(msg) from error
    with (
        contextlib.closing(serving.listen(settings)) as listening,
        engines.build(kind, model, options, told.check) as engine,
    ):
        told.check("ready", 1.0)
        server = serving.Server(engine, settings, listening)
        server.start()
        _say(f"{model} is served on {server.url} (Ctrl-C ends it)")
        told.wait()
        _say("ending: requests in progress may finish")
        server.stop()


class _ToldError(Exception):
    """A signal came while the engine started."""


class _Told(threading.Event):
    """Set by the first signal; a second one is Python's own again."""

    number: int | None = None

    def take(self, number: int, _frame: FrameType | None) -> None:
        """Note it."""
        self.number = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self.set()

    def check(self, _what: str, _fraction: float) -> None:
        """Called while the engine starts.

        Raises:
            _ToldError: a signal came; the start is called off.
        """
        if self.is_set():
            raise _ToldError


@contextlib.contextmanager
def _told_to_stop() -> Iterator[_Told]:
    told = _Told()
    before: dict[int, Any] = {one: signal.signal(one, told.take) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
