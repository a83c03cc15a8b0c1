"""Where a server is, and with which key it is asked."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

import httpx

from omni_notebook.errors import ArgumentError, ConfigError

SHORT_S = 10.0
"""Seconds that a server may take for what waits for nobody: a status, the answer to a probe."""
_VISIBLE = re.compile(r"[!-~]+")
_NOTHING = "nothing was connected"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's URL without a slash at its end, its key, and the bound of short calls.

    Raises:
        ArgumentError: the URL or the bound can be none.
        ConfigError: the key can not be sent.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    short_s: float = SHORT_S

    def __post_init__(self) -> None:
        short_s: Any = self.short_s
        if isinstance(short_s, bool) or not isinstance(short_s, int | float) or not short_s > 0:
            msg = f"timeout={short_s!r} is not a number of seconds above 0; {_NOTHING}"
            raise ArgumentError(msg)
        if self.api_key is not None and not _VISIBLE.fullmatch(self.api_key):
            msg = f"the API key is empty, or holds a space or a character that no header carries; {_NOTHING}"
            raise ConfigError(msg)
        object.__setattr__(self, "url", _checked(self.url))

    @property
    def is_loopback(self) -> bool:
        """Whether the name in the URL is this machine's own, as far as names tell."""
        host = httpx.URL(self.url).host
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries: the key; errors in the words of Python calls; whoever leaves calls off."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"X-Omni-Words": "python", "X-Omni-Leave": "cancel", **key}


def _checked(url: Any) -> str:
    """The URL; `host:8000` is `http://host:8000`."""
    text = url.strip() if isinstance(url, str) else ""
    text = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parsed = httpx.URL(text)
    except (httpx.InvalidURL, UnicodeError) as error:
        msg = f"{url!r} is no URL: {error}; {_NOTHING}"
        raise ArgumentError(msg) from None
    if parsed.scheme not in {"http", "https"} or not parsed.host or not _VISIBLE.fullmatch(text):
        msg = f"{url!r} is no URL of a server, such as http://host:8000; {_NOTHING}"
        raise ArgumentError(msg)
    if parsed.userinfo or parsed.query or parsed.fragment:
        msg = f"a server's URL has a host, a port and perhaps a path; a key goes into api_key; {_NOTHING}"
        raise ArgumentError(msg)
    return text
