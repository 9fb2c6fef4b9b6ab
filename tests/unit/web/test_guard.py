"""Who may see the page."""

import hmac
import secrets
import socket
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from rlplane.errors import ConfigError
from rlplane.transport.gate import COOKIE, Gate, HalfOpenConnections
from rlplane.web.app import serve_dashboard

TOKEN = "correct horse & bättery"
PATHS = ["/", "/static/js/app.js", "/api/view", "/api/history", "/metrics", "/report", "/events", "/nothing"]


@pytest.fixture
def guarded(stage: Any) -> httpx.Client:
    stage.publish()
    client: httpx.Client = stage.serve(Gate(TOKEN))
    return client


def cookie_name(client: httpx.Client) -> str:
    return f"{COOKIE}_{client.base_url.port}"


def test_without_the_right_token_no_page_and_no_event_is_served(guarded: httpx.Client) -> None:
    wrong = "correct horse"
    for path in PATHS:
        for extra in (
            {},
            {"params": {"token": wrong}},
            {"headers": {"authorization": f"Bearer {wrong}"}},
            {"headers": {"cookie": f"{cookie_name(guarded)}={wrong.encode().hex()}"}},
            {"headers": {"cookie": f"{COOKIE}_1={TOKEN.encode().hex()}"}},
        ):
            answer = guarded.get(path, **extra)  # type: ignore[arg-type]
            assert answer.status_code == 401, (path, extra)
            assert "weights" not in answer.text


def test_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address(guarded: httpx.Client) -> None:
    answer = guarded.get("/", params={"token": TOKEN, "range": "60"}, headers={"accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?range=60")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert guarded.get("/").status_code == 200
    assert guarded.get("/api/view").json()["run"]["id"] == "simulated-run"


def test_a_redirect_never_leaves_this_host(guarded: httpx.Client) -> None:
    address = guarded.base_url.copy_with(raw_path=b"//evil.example/?token=" + quote(TOKEN).encode())
    answer = guarded.get(address, headers={"accept": "text/html"})
    assert answer.headers["location"] == "/evil.example/"


def test_a_script_uses_a_bearer_token_and_gets_no_cookie(stage: Any) -> None:
    token = "t0ken-of-a-scraper"
    client = stage.serve(Gate(token))
    answer = client.get("/metrics", headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 200 and "set-cookie" not in answer.headers
    assert client.get("/metrics", params={"token": token}).status_code == 200


def test_the_comparison_takes_the_same_time_wherever_tokens_differ(
    guarded: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return secrets.compare_digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert guarded.get("/?token=wrong").status_code == 401
    assert (b"wrong", TOKEN.encode()) in compared


def test_a_broken_cookie_is_a_wrong_one(guarded: httpx.Client) -> None:
    for cookie in ("zz", "ff", "", "6162=", 'rlplane_token="', "\\"):
        assert guarded.get("/", headers={"cookie": f"{cookie_name(guarded)}={cookie}"}).status_code == 401, (
            cookie
        )


@pytest.mark.parametrize("token", [None, TOKEN])
def test_only_this_machines_own_names_are_answered(stage: Any, token: str | None) -> None:
    client = stage.serve(Gate(token))
    params = {} if token is None else {"token": token}
    for path in ("/", "/metrics", "/api/view"):
        for host in ("127.0.0.1:7457", "localhost", "LOCALHOST:80", "[::1]:7457"):
            assert client.get(path, params=params, headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "", "10.0.0.7"):
            assert client.get(path, params=params, headers={"host": host}).status_code == 421, host


def test_on_another_address_any_address_is_answered_and_of_names_its_own_and_those_allowed(
    stage: Any,
) -> None:
    client = stage.serve(Gate(TOKEN, "0.0.0.0", ["Runs.Example"]))
    for host in ("10.0.0.7", "[fe80::1]:7457", socket.gethostname(), "runs.example:80", "localhost"):
        assert client.get("/", params={"token": TOKEN}, headers={"host": host}).status_code == 200, host
    assert client.get("/", params={"token": TOKEN}, headers={"host": "evil.example"}).status_code == 421


def test_no_websocket_passes(stage: Any) -> None:
    client = stage.serve(Gate(TOKEN))
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert client.get("/events", headers=upgrade).status_code == 401


def silent(client: httpx.Client, said: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", client.base_url.port or 0), timeout=300)
    connection.sendall(said)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes it, which is waited for."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: 1"])
def test_a_connection_that_does_not_send_its_request_is_closed(stage: Any, said: bytes) -> None:
    client = stage.serve(half_open=HalfOpenConnections(patience_s=0.2))
    assert is_closed(silent(client, said))


def test_so_is_one_that_does_not_send_its_second_request(stage: Any) -> None:
    client = stage.serve(half_open=HalfOpenConnections(patience_s=0.2))
    connection = silent(client, b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = connection.recv(65536)
    while b"Not Found" not in answer.partition(b"\r\n\r\n")[2]:
        answer += connection.recv(65536)
    connection.sendall(b"GET")  # uvicorn's own timer for idle connections ends with the first byte.
    assert is_closed(connection)


def test_a_page_that_is_open_is_not_closed_with_those_that_ask_for_nothing(stage: Any) -> None:
    half_open = HalfOpenConnections(patience_s=0.2)
    client = stage.serve(half_open=half_open)
    stage.publish()
    with client.stream("GET", "/events") as events:
        lines = events.iter_lines()
        next(lines)
        assert is_closed(silent(client))  # It came later, so the stream has had more time than it.
        stage.publish()
        assert any(line.startswith("data:") for line in lines)


def test_so_many_connections_that_ask_for_nothing_are_kept_and_no_more(stage: Any) -> None:
    half_open = HalfOpenConnections(most=4, patience_s=600)
    client = stage.serve(half_open=half_open)
    crowd = [silent(client) for _ in range(12)]
    assert client.get("/api/view").status_code == 200  # Nobody who asks is kept out.
    assert all(is_closed(connection) for connection in crowd[:8])
    assert 0 < len(half_open) <= 4
    for connection in crowd[8:]:
        connection.close()


def test_every_answer_forbids_what_the_page_does_not_need(client: httpx.Client) -> None:
    for path in ("/", "/api/view", "/static/style.css", "/nothing", "/metrics"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_another_host_needs_a_token(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' needs a token"):
        serve_dashboard(stage.feed, host="0.0.0.0", token=None)
