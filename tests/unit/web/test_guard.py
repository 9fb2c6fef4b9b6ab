"""Who may see the page."""

import hmac
import secrets
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from rlplane.errors import ConfigError
from rlplane.web import guard
from rlplane.web.app import serve_dashboard

TOKEN = "correct horse & bättery"
PATHS = ["/", "/static/js/app.js", "/api/view", "/api/history", "/metrics", "/report", "/events", "/nothing"]


@pytest.fixture
def guarded(stage: Any) -> httpx.Client:
    stage.publish()
    client: httpx.Client = stage.serve(TOKEN)
    client.headers["host"] = "10.0.0.7"
    return client


def test_without_the_right_token_no_page_and_no_event_is_served(guarded: httpx.Client) -> None:
    wrong = "correct horse"
    for path in PATHS:
        for extra in (
            {},
            {"params": {"token": wrong}},
            {"headers": {"authorization": f"Bearer {wrong}"}},
            {"headers": {"cookie": f"{guard.COOKIE}={wrong.encode().hex()}"}},
        ):
            answer = guarded.get(path, **extra)  # type: ignore[arg-type]
            assert answer.status_code == 401, (path, extra)
            assert "weights" not in answer.text


def test_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address(guarded: httpx.Client) -> None:
    answer = guarded.get("/", params={"token": TOKEN, "range": "60"}, headers={"accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?range=60")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert guarded.get("/").status_code == 200
    assert guarded.get("/api/view").json()["run"]["id"] == "simulated-run"


def test_a_redirect_never_leaves_this_host(guarded: httpx.Client) -> None:
    address = guarded.base_url.copy_with(raw_path=b"//evil.example/?token=" + quote(TOKEN).encode())
    answer = guarded.get(address, headers={"accept": "text/html"})
    assert answer.headers["location"] == "/evil.example/"


def test_a_script_uses_a_bearer_token_and_gets_no_cookie(stage: Any) -> None:
    token = "t0ken-of-a-scraper"
    client = stage.serve(token)
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
        assert guarded.get("/", headers={"cookie": f"{guard.COOKIE}={cookie}"}).status_code == 401, cookie


def test_without_a_token_only_this_machines_own_names_are_answered(client: httpx.Client) -> None:
    for host in ("127.0.0.1:7457", "localhost", "LOCALHOST:80", "[::1]:7457"):
        assert client.get("/", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "", "10.0.0.7"):
        assert client.get("/", headers={"host": host}).status_code == 421, host


def test_every_answer_forbids_what_the_page_does_not_need(client: httpx.Client) -> None:
    for path in ("/", "/api/view", "/static/style.css", "/nothing", "/metrics"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_another_host_needs_a_token_and_not_a_short_one(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' needs a token"):
        serve_dashboard(stage.feed, host="0.0.0.0")
    with pytest.raises(ConfigError, match="at least 8"):
        serve_dashboard(stage.feed, host="0.0.0.0", token="short")
