"""What a server is told when it starts."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass, field

from omni_notebook.errors import ConfigError
from omni_notebook.verbs.serving import PORT

_VISIBLE = re.compile(r"[!-~]+")
BODY_BYTES = 4 * 1024 * 1024
REQUEST_S = 600.0
PATIENCE_S = 30.0
CONNECTIONS = 512


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, whom it answers and what it is called.

    Attributes:
        host: an address of this machine; anything but the loopback needs `api_key`.
        port: 0 takes a free one.
        api_key: what clients send as `Authorization: Bearer …`; None asks for none.
        served_model_names: what requests may call the model; empty: the name that it was started with.
        allowed_hosts: further names by which clients may call this server (`Host` headers).
        body_bytes: most bytes of a request's body.
        request_s: most seconds that a generation may take.
        connections: most connections at once, and never more than half of the files that the process may open.
        patience_s: most seconds that a client may take for a request's head, its body, or the next bytes of an answer.

    Raises:
        ConfigError: an address that others can reach and no key, or a port that is none.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    api_key: str | None = field(default=None, repr=False)
    served_model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    body_bytes: int = BODY_BYTES
    request_s: float = REQUEST_S
    patience_s: float = PATIENCE_S
    connections: int = CONNECTIONS

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", _unbracketed(self.host))
        if not 0 <= self.port <= 65535:
            msg = f"port {self.port} is none; ports are 0 (any free one) to 65535. Nothing was started"
            raise ConfigError(msg)
        if self.api_key is not None and not self.api_key.strip():
            msg = "the API key is empty; give one, or none at all. Nothing was started"
            raise ConfigError(msg)
        if self.api_key is not None and not _VISIBLE.fullmatch(self.api_key):
            msg = (
                "the API key holds a space, a line end or a character that is not ASCII, which no header carries "
                "as it is; take another. Nothing was started"
            )
            raise ConfigError(msg)
        if not self.is_loopback and self.api_key is None:
            msg = (
                f"host {self.host!r} can be reached from other machines: give --api-key KEY, "
                "or listen on 127.0.0.1. Nothing was started"
            )
            raise ConfigError(msg)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The `Host` headers that are answered where no key is asked for."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        return ("localhost", "127.0.0.1", "[::1]", own, *self.allowed_hosts)


def _unbracketed(host: str) -> str:
    """An address as sockets take it: `[::1]`, as URLs spell it, is `::1`.

    Raises:
        ConfigError: it has brackets, and no IPv6 address between them.
    """
    if not set("[]") & set(host):
        return host
    inner = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        if host == f"[{inner}]":
            return str(ipaddress.IPv6Address(inner))
    msg = f"host {host!r} is no address: brackets hold an IPv6 one, such as [::1]. Nothing was started"
    raise ConfigError(msg)
