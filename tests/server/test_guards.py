"""Who is answered: keys, addresses, names, sizes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from omni_notebook.errors import ConfigError
from omni_notebook.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from omni_notebook.engine.async_omni import AsyncOmni
    from omni_notebook.server.serving import Server


@pytest.fixture
def locked(engine: AsyncOmni) -> Iterator[httpx.Client]:
    import httpx

    from omni_notebook.server.serving import Server

    server = Server(engine, ServerSettings(port=0, api_key="s3cret", body_bytes=2000))
    server.start()
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
    server.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"give --api-key KEY"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, api_key="x").api_key == "x"


@pytest.mark.parametrize("known", [{"port": -1}, {"port": 65536}, {"api_key": " "}])
def test_settings_that_can_not_be_meant_are_refused(known: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Nothing was started"):
        ServerSettings(**known)


def test_an_ipv6_address_may_have_the_brackets_of_a_url() -> None:
    bracketed = ServerSettings(host="[::1]")
    assert (bracketed.host, bracketed.is_loopback) == ("::1", True)
    assert "[::1]" in bracketed.hosts
    with pytest.raises(ConfigError, match="'::' can be reached from other machines: give --api-key"):
        ServerSettings(host="[::]")
    for host in ("[::1", "::1]", "[localhost]", "[127.0.0.1]", "[]"):
        with pytest.raises(ConfigError, match="is no address: brackets hold an IPv6 one"):
            ServerSettings(host=host)


def test_a_key_is_never_shown() -> None:
    assert "s3cret" not in repr(ServerSettings(api_key="s3cret"))


@pytest.mark.parametrize("header", [{}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cre"}])
def test_without_the_key_nothing_is_answered_but_health(locked: httpx.Client, header: dict[str, str]) -> None:
    for path in ("/v1/omni/status", "/v1/models", "/openapi.json", "/nothing"):
        assert locked.get(path, headers=header).status_code == 401
    assert locked.post("/v1/omni/sleep", json={}, headers=header).status_code == 401
    assert locked.get("/health", headers=header).status_code == 200


def test_with_the_key_it_is_as_without(locked: httpx.Client) -> None:
    header = {"Authorization": "Bearer s3cret"}
    assert locked.get("/v1/omni/status", headers=header).status_code == 200
    assert locked.get("/nothing", headers=header).json()["error"]["message"].startswith("there is no /nothing here")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_413(locked: httpx.Client, chunked: bool) -> None:
    content: Any = b"x" * 3000
    if chunked:
        content = (b"x" * 1000 for _ in range(3))
    answer = locked.post("/v1/omni/sleep", content=content, headers={"Authorization": "Bearer s3cret"})
    assert answer.status_code == 413


def test_a_page_in_a_browser_can_not_reach_a_server_without_a_key(http: httpx.Client) -> None:
    assert http.get("/v1/omni/status", headers={"Host": "evil.example"}).status_code == 400
    assert http.get("/v1/omni/status", headers={"Host": "localhost:8000"}).status_code == 200


def test_a_taken_port_is_one_line(server: Server, engine: AsyncOmni) -> None:
    from omni_notebook.server.serving import Server as Another

    with pytest.raises(ConfigError, match=r"can not listen on 127\.0\.0\.1:\d+: Address already in use"):
        Another(engine, ServerSettings(port=server.port))


def test_a_port_is_taken_from_the_moment_it_was_given() -> None:
    from omni_notebook.server.serving import listen

    with listen(ServerSettings(port=0)) as first, pytest.raises(ConfigError, match="Address already in use"):
        listen(ServerSettings(port=first.getsockname()[1]))


def test_nothing_but_the_port_listens_and_after_a_stop_nothing_at_all(engine: AsyncOmni) -> None:
    from omni_notebook.server.serving import Server

    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}

    before = listening()
    server = Server(engine, ServerSettings(port=0))
    server.start()
    assert listening() - before == {("127.0.0.1", server.port)}
    server.stop()
    assert listening() == before
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port), timeout=2):
        pass
    assert not engine.status().closed


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://localhost:8888", 422), ("http://127.0.0.1", 422)],
)
def test_a_page_of_another_site_gives_no_order_that_needs_no_body(http: httpx.Client, origin: str, status: int) -> None:
    answer = http.post("/v1/omni/loras/7/pin", headers={"Origin": origin})
    assert answer.status_code == status
    assert ("gives no orders here" in answer.json()["error"]["message"]) == (status == 403)
    assert http.get("/health", headers={"Origin": origin}).status_code == 200
