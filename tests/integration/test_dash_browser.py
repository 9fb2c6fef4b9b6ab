"""``rlplane dash`` in a real browser: it renders, lives, survives, and executes nothing that it shows."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from tests.simulated_run import SimulatedRun, SnapshotServer

from rlplane.metrics.snapshot import SessionState

pytestmark = pytest.mark.slow

EVIL = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --force-prefers-reduced-motion"
)


def until(condition: Callable[[], Any], what: str, seconds: float = 40) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.05)


class Dash:
    """The command in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlplane.cli", "dash", *arguments], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.address = ""
        for line in self.process.stderr:
            if found := re.match(r"open (\S+)", line):
                self.address = found[1]
                break
        assert self.address, "rlplane dash did not start"
        self.base, _, self.token = self.address.partition("?token=")
        # The process would wait for ever to write into a pipe that is full and not read.
        self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._reader.start()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(20)
        assert self.process.stderr is not None
        self._reader.join()
        self.process.stderr.close()
        return code


class Publisher:
    """A run that goes on, half a second of it every tenth of one."""

    def __init__(self, address: str, run: SimulatedRun) -> None:
        self.server = SnapshotServer(address)
        self.run = run
        self._going = threading.Event()
        self._going.set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self._thread.start()

    def _publish(self) -> None:
        while not self._end.wait(0.1):
            if self._going.is_set():
                self.server.publish(self.run.step(0.5))

    def pause(self) -> None:
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.server.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium and driver, "the tests need chromium and chromedriver"
    options = Options()
    options.binary_location = chromium
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.add_argument("--window-size=1440,1100")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    directory = tmp_path_factory.mktemp("run")
    run = SimulatedRun(
        ["rollouts", EVIL], workers=130, slow_task="logprob", started_ns=time.time_ns() - 400 * 10**9
    )
    run.fail(f"KeyError: {EVIL}")
    for _ in range(300):
        run.pass_time()
    publisher = Publisher(f"ipc://{directory}/s.sock", run)
    yield publisher
    publisher.close()


@pytest.fixture(scope="module")
def dash(publisher: Publisher) -> Iterator[Dash]:
    served = Dash(publisher.server.address, "--port", "0")
    yield served
    assert served.stop() in (0, -signal.SIGTERM)


@pytest.fixture
def page(browser: webdriver.Chrome, dash: Dash) -> Iterator[webdriver.Chrome]:
    """The page, loaded and live; at the end nothing may have been said on the console."""
    browser.get_log("browser")
    browser.get(dash.address)
    until(lambda: text(browser, "#link-text") == "live", "the page going live")
    until(lambda: len(rows(browser, "#workers")) == 100, "the tables")
    yield browser
    assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []


def one(browser: webdriver.Chrome, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def text(browser: webdriver.Chrome, selector: str) -> str:
    return str(
        browser.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
    )


def rows(browser: webdriver.Chrome, selector: str) -> list[list[str]]:
    script = (
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    found: list[list[str]] = browser.execute_script(script, selector)
    return found


def painted(browser: webdriver.Chrome, selector: str) -> int:
    """How many pixels of a plot are not transparent."""
    script = """
        const canvas = document.querySelector(arguments[0] + ' canvas');
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let at = 3; at < data.length; at += 4) if (data[at]) count += 1;
        return count;
    """
    return int(browser.execute_script(script, selector))


def until_painted(browser: webdriver.Chrome, selector: str) -> None:
    until(lambda: painted(browser, selector) > 2000, f"the plot {selector}")


def press(browser: webdriver.Chrome, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def test_every_part_of_the_page_is_drawn(page: webdriver.Chrome) -> None:
    assert text(page, "#state") == "LIVE" and text(page, "#run-id") == "simulated-run"
    assert len(page.find_elements(By.CSS_SELECTOR, ".tile")) == 6
    for plot in ("throughput", "latency", "waiting", "held", "stale"):
        until_painted(page, f"#plot-{plot}")
    assert len(page.find_elements(By.CSS_SELECTOR, "#histogram .hbar")) > 10
    assert [row[0] for row in rows(page, "#ops")] == ["put", "claim_meta", "get_data", "clear"]
    assert text(page, "#workers .more") == "Show all 130"
    one(page, "#workers .more button").click()
    until(lambda: len(rows(page, "#workers")) == 130, "all workers")


def test_the_stage_that_holds_everything_up_is_seen_at_a_glance(page: webdriver.Chrome) -> None:
    assert re.match(r"logprob holds everything up: [\d.,k]+ samples wait", text(page, "#flow-says"))
    marked = page.find_elements(By.CSS_SELECTOR, "#flow .node[data-holdup='true']")
    assert [node.get_attribute("data-name") for node in marked] == ["logprob"]
    title = marked[0].find_element(By.TAG_NAME, "title").get_attribute("textContent")
    assert title == "logprob: claims samples with reward_values"
    rates = [node.text for node in page.find_elements(By.CSS_SELECTOR, "#flow .rate") if node.text]
    assert len(rates) == 4 and all(rate.endswith("/s") for rate in rates)


def test_the_stages_of_the_flow_stand_in_the_order_in_which_the_data_passes(page: webdriver.Chrome) -> None:
    nodes = page.find_elements(By.CSS_SELECTOR, "#flow .node")
    across = sorted(nodes, key=lambda node: node.find_element(By.CSS_SELECTOR, ".box").location["x"])
    names = [node.get_attribute("data-name") for node in across]
    assert names[0] == "Producers" and names[2:] == ["reward", "logprob", "train", "Cleared"]


def test_the_share_of_a_training_step_and_ones_own_numbers_are_shown(page: webdriver.Chrome) -> None:
    says = r"step \d+: 40% of a step in the plane \(waiting 30%, round trips 7.5%, bytes 2.5%\); 900 tokens/s"
    until(lambda: re.fullmatch(says, text(page, "#steps-says")), "the share of the steps")
    assert rows(page, "#step-ops") == [["claim_meta", "2", "40%", "30%", "7.5%", "2.5%"]]
    assert text(page, "#scalar-name") == "reward"
    for plot in ("steps", "scalar"):
        until_painted(page, f"#plot-{plot}")


def test_what_a_flow_policy_has_done_is_shown_by_reason(page: webdriver.Chrome) -> None:
    until(lambda: rows(page, "#policies"), "the policies")
    (policy,) = rows(page, "#policies")
    assert policy == ["rollouts", "ready_first", "7", "2", "640", "24", "16 stale · 3 timeout", "2 cancelled"]


def test_the_bytes_of_a_tree_are_shown_by_leaf(page: webdriver.Chrome) -> None:
    until(lambda: len(rows(page, "#fields")) == 4, "the fields")
    fields = [row[1] for row in rows(page, "#fields")]
    assert fields == ["mm.pixel_values", "mm.pixel_values", "tokens", "tokens"]


def test_it_updates_by_itself(page: webdriver.Chrome) -> None:
    before = text(page, "#uptime"), text(page, "#tile-bytes_held b"), rows(page, "#ops")[0][1]
    until(
        lambda: all(
            old != new
            for old, new in zip(
                before,
                (text(page, "#uptime"), text(page, "#tile-bytes_held b"), rows(page, "#ops")[0][1]),
                strict=True,
            )
        ),
        "new figures",
    )


def test_names_and_messages_are_shown_and_never_run(page: webdriver.Chrome) -> None:
    assert EVIL in [row[0] for row in rows(page, "#partitions")]
    assert f"KeyError: {EVIL}" in text(page, "#log")
    page.execute_script(
        "const select = document.querySelector('#flow-partition'); select.value = arguments[0];"
        "select.dispatchEvent(new Event('change'))",
        EVIL,
    )
    until(lambda: "<script" in text(page, "#flow"), "the flow of the partition")
    assert page.title == "simulated-run · rlplane"
    assert page.find_elements(By.CSS_SELECTOR, "main img, main script") == []


def test_a_table_is_sorted_by_mouse_and_by_keyboard(page: webdriver.Chrome) -> None:
    heads = page.find_elements(By.CSS_SELECTOR, "#workers th button")
    heads[0].click()
    names = [row[0] for row in rows(page, "#workers")]
    assert names == sorted(names)
    assert page.find_elements(By.CSS_SELECTOR, "#workers th")[0].get_attribute("aria-sort") == "ascending"
    heads[0].send_keys(Keys.ENTER)
    names = [row[0] for row in rows(page, "#workers")]
    assert names == sorted(names, reverse=True)


def test_the_keyboard_alone_is_enough(page: webdriver.Chrome) -> None:
    press(page, "5")
    assert one(page, "#ranges button[data-range='all']").get_attribute("aria-pressed") == "true"
    press(page, "/")
    page.switch_to.active_element.send_keys("rollout-12")
    until(lambda: 0 < len(rows(page, "#workers")) < 12, "the filter")
    assert all("rollout-12" in row[0] for row in rows(page, "#workers"))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    one(page, "body").send_keys(Keys.HOME)
    page.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    for _ in range(40):
        press(page, Keys.TAB)
        focused = page.switch_to.active_element
        reached.add(focused.get_attribute("id") or focused.text)
    assert {"pause", "theme", "report", "flow-partition", "latency-op", "All"} <= reached


def test_a_pause_holds_the_page_still(page: webdriver.Chrome) -> None:
    press(page, "p")
    assert text(page, "#link-text") == "paused"
    held = text(page, "#uptime")
    seen = page.execute_script("return performance.now()")
    until(lambda: page.execute_script("return performance.now()") > seen + 1500, "time passing")
    assert text(page, "#uptime") == held
    press(page, "p")
    until(lambda: text(page, "#uptime") != held, "going on")


def test_one_looks_back_by_range_and_by_dragging_over_a_plot(page: webdriver.Chrome) -> None:
    press(page, "1")
    assert one(page, "#ranges button[data-range='60']").get_attribute("aria-pressed") == "true"
    press(page, "5")
    plot = one(page, "#plot-held .u-over")
    width = plot.size["width"]
    ActionChains(page).move_to_element_with_offset(plot, -width // 4, 0).click_and_hold().move_by_offset(
        width // 4, 0
    ).release().perform()
    pressed = "#ranges button[aria-pressed='true']"
    until(lambda: not page.find_elements(By.CSS_SELECTOR, pressed), "looking closer")
    asked = "return performance.getEntriesByType('resource').some((entry) => entry.name.includes('end_s='))"
    until(lambda: page.execute_script(asked), "asking for just that span")
    press(page, Keys.ESCAPE)
    assert one(page, pressed).get_attribute("data-range") == "all"


def test_dark_and_light_differ_and_the_choice_is_kept(page: webdriver.Chrome) -> None:
    script = "return getComputedStyle(document.body).backgroundColor"
    first = page.execute_script(script)
    press(page, "t")
    second = page.execute_script(script)
    assert first != second
    page.refresh()
    until(lambda: text(page, "#link-text") == "live", "the page going live")
    assert page.execute_script(script) == second
    press(page, "t")
    assert page.execute_script(script) == first


@pytest.mark.parametrize("width", [360, 390, 820])
def test_it_can_be_read_on_a_phone(page: webdriver.Chrome, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.refresh()
        until(lambda: text(page, "#link-text") == "live", "the page going live")
        until(lambda: "holds everything up" in text(page, "#flow"), "the flow")
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        sizes = page.execute_script(
            "return [...document.querySelectorAll('#flow text, .tile b, #flow-says')]"
            ".filter((node) => node.textContent).map((node) => parseFloat(getComputedStyle(node).fontSize))"
        )
        assert min(sizes) >= 12
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_old_data_is_called_old(page: webdriver.Chrome, publisher: Publisher) -> None:
    publisher.pause()
    try:
        until(lambda: text(page, "#link-text") == "old data", "noticing")
        assert "Old data: no news for" in text(page, "#banner")
    finally:
        publisher.go_on()
    until(lambda: text(page, "#link-text") == "live", "going on")


def test_it_survives_a_server_that_goes_and_comes_back(
    browser: webdriver.Chrome, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPLANE_TOKEN", "the same for both")
    port = str(free_port())
    served = Dash(publisher.server.address, "--port", port)
    browser.get(served.address)
    until(lambda: text(browser, "#link-text") == "live", "the page going live")
    browser.execute_script("window.sameDocument = true")
    served.stop(signal.SIGKILL)
    until(lambda: text(browser, "#link-text") == "reconnecting", "noticing the loss")
    assert "connection" in text(browser, "#banner")
    before = text(browser, "#uptime")
    served = Dash(publisher.server.address, "--port", port)
    try:
        until(lambda: text(browser, "#link-text") == "live", "coming back")
        until(lambda: text(browser, "#uptime") != before, "new figures")
        assert browser.execute_script("return window.sameDocument") is True
    finally:
        served.stop()
        browser.get("about:blank")


def test_a_token_opens_the_page_and_its_events_and_nothing_else_does(
    browser: webdriver.Chrome, publisher: Publisher
) -> None:
    served = Dash(publisher.server.address, "--port", "0")
    other = Dash(publisher.server.address, "--port", "0")
    try:
        bare = served.address.partition("?")[0]
        assert httpx.get(bare, trust_env=False).status_code == 401
        assert httpx.get(f"{bare}events", trust_env=False).status_code == 401
        browser.get(bare)
        assert "a token is needed" in one(browser, "body").text
        browser.get(served.address)
        until(lambda: text(browser, "#link-text") == "live", "the page going live")
        assert browser.current_url == bare
        # A second page on this machine has a cookie of its own, and leaves the first one's alone.
        browser.get(other.address)
        until(lambda: text(browser, "#link-text") == "live", "the other page going live")
        browser.get(bare)
        until(lambda: text(browser, "#link-text") == "live", "the page going live again")
    finally:
        served.stop()
        other.stop()
        browser.get("about:blank")


def test_the_browser_that_is_opened_gets_the_token_by_a_file_and_not_by_its_command_line(
    browser: webdriver.Chrome, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = tmp_path / "opened"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("BROWSER", f"{sys.executable} -c \"open('{opened}', 'w').write('%s')\"")
    served = Dash(publisher.server.address, "--port", "0", "--open")
    try:
        until(lambda: opened.exists() and opened.read_text(), "the browser being opened")
        address = opened.read_text()
        assert "token" not in address
        assert Path(address.removeprefix("file://")).stat().st_mode & 0o077 == 0
        browser.get(address)
        until(lambda: "live" in browser.page_source and text(browser, "#link-text") == "live", "the page")
    finally:
        served.stop()
        browser.get("about:blank")
    assert not list(tmp_path.glob("rlplane/*.html"))


def test_at_the_end_the_report_is_one_link_away(browser: webdriver.Chrome, tmp_path: Path) -> None:
    run = SimulatedRun(run_id="the end", started_ns=time.time_ns() - 10**10)
    with SnapshotServer(f"ipc://{tmp_path}/s.sock") as server:
        server.publish(run.step())
        served = Dash(server.address, "--port", "0")
        try:
            browser.get(served.address)
            until(lambda: text(browser, "#link-text") == "live", "the page going live")
            server.publish(run.step(state=SessionState.COMPLETE))
            until(lambda: text(browser, "#report") == "Final report", "the end")
            assert text(browser, "#link-text") == "ended" and text(browser, "#state") == "COMPLETE"
            browser.get(str(one(browser, "#report").get_attribute("href")))
            assert "Run the end: COMPLETE" in one(browser, "body").text
            saved = tmp_path / "report.html"
            token = {"token": served.token}
            saved.write_text(httpx.get(browser.current_url, params=token, trust_env=False).text)
            browser.get(saved.as_uri())
            assert "Run the end: COMPLETE" in one(browser, "body").text
        finally:
            served.stop()
            browser.get("about:blank")


def test_a_finished_run_of_this_machine_stands_beside_the_live_one(
    browser: webdriver.Chrome, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = SimulatedRun(run_id="yesterday", workers=2)
    directory = tmp_path / "runs" / "yesterday"
    directory.mkdir(parents=True)
    final = msgspec.json.encode(earlier.step(10.0, SessionState.COMPLETE))
    (directory / "final_snapshot.json").write_bytes(final)
    monkeypatch.chdir(tmp_path)
    served = Dash(publisher.server.address, "--port", "0")
    try:
        browser.get(served.address)
        until(lambda: text(browser, "#link-text") == "live", "the page going live")
        until(lambda: "yesterday" in text(browser, "#run-picker"), "the finished run in the picker")
        assert not one(browser, "#beside-panel").is_displayed()
        Select(one(browser, "#run-picker")).select_by_value("yesterday")
        until(lambda: one(browser, "#beside-panel").is_displayed(), "the two runs side by side")
        assert text(browser, "#beside thead") == "simulated-runyesterday"
        figures = {name: values for name, *values in rows(browser, "#beside")}
        assert figures["state"] == ["LIVE", "COMPLETE"]
        assert figures["share of a training step in the plane"] == ["40%", "40%"]
        token = {"token": served.token}
        report = httpx.get(f"{served.base}report/yesterday.html", params=token, trust_env=False)
        assert report.status_code == 200 and "Run yesterday: COMPLETE" in report.text
    finally:
        served.stop()


def test_the_page_can_be_opened_before_there_is_a_run(
    browser: webdriver.Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "local")  # other tests may have a cluster on this machine
    served = Dash("--port", "0")
    try:
        browser.get(served.address)
        until(lambda: "No run found on this machine yet" in text(browser, "#banner"), "saying so")
    finally:
        served.stop()
        browser.get("about:blank")
