"""What the page's server answers."""

import json
import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tests.simulated_run import SimulatedRun

from rlplane.metrics.snapshot import SessionState
from rlplane.viewing.feed import FeedStatus
from rlplane.web.app import static_directory
from rlplane.web.view import make_view

STATIC = static_directory()
EVIL = "<script>alert(1)</script>"


def test_before_the_first_picture_it_says_what_it_waits_for(stage: Any, client: httpx.Client) -> None:
    assert client.get("/api/view").json()["feed"]["state"] == "waiting"
    assert client.get("/report").status_code == 404
    assert "rlplane_up 0.0" in client.get("/metrics").text


def test_the_view_has_what_the_page_draws(stage: Any, client: httpx.Client) -> None:
    stage.publish()
    view = client.get("/api/view").json()
    assert view["run"]["id"] == "simulated-run" and view["feed"]["state"] == "live"
    assert {op["op"] for op in view["ops"]} == {"put", "claim_meta", "get_data", "clear"}
    assert sum(view["ops"][0]["latency"]["counts"]) == view["ops"][0]["latency"]["count"]
    assert {flow["partition"] for flow in view["flows"]} == {EVIL, "weights"}
    assert view["totals"]["workers"] == 4
    assert [claim["task"] for claim in view["lifecycle"]["finished"][0]["claims"]] == [
        "reward",
        "logprob",
        "train",
    ]


def test_the_history_can_be_cut_and_thinned(stage: Any, client: httpx.Client) -> None:
    for _ in range(30):
        stage.publish()
    answer = client.get("/api/history", params={"start_s": 10, "end_s": 20, "points": 5}).json()
    times = answer["columns"]["time_s"]
    assert 1 <= len(times) <= 5 and min(times) >= 10 and max(times) <= 20


def test_a_history_that_makes_no_sense_is_refused(client: httpx.Client) -> None:
    for query in ("start_s=x", "points=1", "start_s=nan", "points=1e9"):
        assert client.get(f"/api/history?{query}").status_code == 400, query


def test_events_begin_with_the_picture_of_now_and_go_on_with_new_ones(
    stage: Any, client: httpx.Client
) -> None:
    stage.publish()
    with client.stream("GET", "/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = parsed_events(answer)
        name, view = next(events)
        assert (name, view["run"]["id"], view["run"]["seq"]) == ("view", "simulated-run", 1)
        stage.publish(2.0)
        name, view = next(event for event in events if event[0] == "view" and event[1]["run"]["seq"] == 2)
        assert view["points"]["seconds"] == [2.0]


def parsed_events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_the_report_is_one_file_without_a_script_and_with_names_escaped(
    stage: Any, client: httpx.Client
) -> None:
    stage.publish(state=SessionState.COMPLETE)
    answer = client.get("/report/simulated-run.html?download")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-disposition"] == 'attachment; filename="rlplane-simulated-run.html"'
    assert "script-src" not in answer.headers["content-security-policy"]
    assert EVIL not in answer.text and "&lt;script&gt;" in answer.text
    assert not re.search(r"<script|<link|<img[^>]+src=\"http|@import", answer.text)


def test_the_report_of_a_finished_run_stays_when_the_next_one_is_shown(
    stage: Any, client: httpx.Client
) -> None:
    stage.publish(state=SessionState.COMPLETE)
    stage.run = SimulatedRun(run_id="next", started_ns=stage.run.started_ns + 1)
    stage.publish()
    assert client.get("/api/view").json()["run"]["id"] == "next"
    assert "COMPLETE" in client.get("/report/simulated-run.html").text
    assert client.get("/report/nobody.html").status_code == 404


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline_script = False
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_data(self, data: str) -> None:
        self.inline_script |= self._in_script and bool(data.strip())

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False


def test_the_page_has_no_inline_script_or_style_and_asks_no_other_host() -> None:
    page = _Page()
    page.feed((STATIC / "index.html").read_text())
    assert not page.inline_script
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("/", "#")), value


def test_every_file_that_the_page_loads_is_shipped() -> None:
    wanted = set(re.findall(r"/static/([\w./-]+)", (STATIC / "index.html").read_text()))
    for script in (STATIC / "js").glob("*.js"):
        for path in re.findall(r'from "(\.[^"]+)"', script.read_text()):
            wanted.add(str((script.parent / path).resolve().relative_to(STATIC)))
    assert len(wanted) > 12
    assert all((STATIC / path).is_file() for path in wanted)
    assert (STATIC / "vendor" / "uPlot.LICENSE.txt").read_text().startswith("The MIT License")


def test_no_script_of_ours_parses_html() -> None:
    for script in (STATIC / "js").glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script.read_text()
        )


def test_the_wheel_ships_the_page() -> None:
    """What pyproject.toml says is what setuptools copies."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["rlplane"]
    root = STATIC.parents[1]
    shipped = {path for pattern in patterns for path in root.glob(pattern)}
    assert {path for path in STATIC.rglob("*") if path.is_file()} <= shipped


def test_the_view_of_a_large_run_stays_small() -> None:
    run = SimulatedRun([f"partition-{number}" for number in range(200)], workers=500)
    view = make_view(run.step(), FeedStatus("live", "live"))
    assert len(msgspec.json.encode(view)) < 400_000
