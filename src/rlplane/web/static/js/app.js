// The page: takes each picture from the stream and gives every part of the page its share.

import { Beside } from "./beside.js";
import { byId, el, segments, setAttribute, setOptions, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { FlowPicture } from "./flow.js";
import * as format from "./format.js";
import { Histogram } from "./histogram.js";
import { History } from "./history.js";
import { SampleLifecycle } from "./lifecycle.js";
import { TimePlot } from "./plots.js";
import { TrainingSteps } from "./steps.js";
import { Table } from "./table.js";
import { onThemeChange, startTheme, toggleTheme } from "./theme.js";
import { Tiles } from "./tiles.js";

const THROUGHPUT = {
  samples: { title: "samples/s", format: format.perSecond, lines: [
    { key: "written", name: "written", colour: "--blue" },
    { key: "claimed", name: "claims", colour: "--violet" },
    { key: "cleared", name: "cleared", colour: "--teal" }] },
  bytes: { title: "bytes/s", binary: true, format: (value) => `${format.bytes(value)}/s`, lines: [
    { key: "bytes", name: "bytes moved", colour: "--teal", fill: "--teal-soft" }] },
  ops: { title: "ops/s", format: format.perSecond, lines: [
    { key: "ops", name: "operations", colour: "--blue", fill: "--blue-soft" },
    { key: "failures", name: "failed", colour: "--red" }] },
};
const HELD = {
  bytes: { title: "bytes", binary: true, format: format.bytes, lines: [
    { key: "bytes_held", name: "bytes held", colour: "--teal", fill: "--teal-soft" }] },
  samples: { title: "samples", format: format.count, lines: [
    { key: "samples_held", name: "samples held", colour: "--violet" }] },
};
const LATENCY_LINES = [
  { name: "p50", colour: "--teal" }, { name: "p90", colour: "--blue" }, { name: "p99", colour: "--amber" },
  { name: "mean", colour: "--faint", dash: [4, 4] }];
const WAIT_KEYS = ["wait_p50", "wait_p90", "wait_p99", "wait_mean"];
const STALE_LINES = [{ name: "mean", colour: "--violet", fill: "--blue-soft" }, { name: "p90", colour: "--amber", dash: [5, 4] }];

const fillOf = (row) => {
  const shares = [[row.samples, row.capacity_samples], [row.bytes, row.capacity_bytes]]
    .filter(([, capacity]) => capacity).map(([held, capacity]) => held / capacity);
  return shares.length ? Math.max(...shares) : null;
};
const badIfAny = (value) => (value > 0 ? "error" : "quiet");
const latencyOf = (name) => (row) => row.latency?.percentiles?.[name] ?? null;

class Page {
  constructor() {
    this.view = null;
    this.paused = false;
    this.linked = false;
    this.chosen = { throughput: "samples", held: "bytes", lifecycle: "oldest" };
    this.history = new History(() => this.drawHistory());
    this.tiles = new Tiles(byId("tiles"));
    this.flow = new FlowPicture(byId("flow"));
    this.histogram = new Histogram(byId("histogram"));
    this.lifecycle = new SampleLifecycle(byId("lifecycle"));
    this.beside = new Beside();
    this.makePlots();
    this.makeTables();
    this.makeControls();
    this.feed = new Feed({
      onView: (view) => this.take(view),
      onStatus: (status) => this.showLink(status),
      onLink: (linked) => this.setLinked(linked),
    });
  }

  makePlots() {
    const onZoom = (from, to) => this.zoom(from, to);
    this.plots = {
      throughput: new TimePlot(byId("plot-throughput"), { ...THROUGHPUT.samples, onZoom }),
      latency: new TimePlot(byId("plot-latency"), { lines: LATENCY_LINES, format: format.ns, log: true, onZoom }),
      waiting: new TimePlot(byId("plot-waiting"), { lines: LATENCY_LINES, format: format.ns, log: true, onZoom }),
      held: new TimePlot(byId("plot-held"), { ...HELD.bytes, onZoom }),
      stale: new TimePlot(byId("plot-stale"), { lines: STALE_LINES, format: (value) => value.toFixed(1), onZoom }),
    };
    this.steps = new TrainingSteps(onZoom);
    onThemeChange(() => [...Object.values(this.plots), this.steps].forEach((plot) => plot.redraw()));
  }

  makeTables() {
    this.opTable = new Table(byId("ops"), "op", [
      { key: "op", title: "operation", text: true },
      { key: "count", title: "count", format: format.count },
      { key: "count_rate", title: "per second", format: format.count },
      { key: "bytes_rate", title: "bytes/s", format: format.bytes },
      { key: "p50", title: "p50", value: latencyOf("p50"), format: format.ns },
      { key: "p90", title: "p90", value: latencyOf("p90"), format: format.ns },
      { key: "p99", title: "p99", value: latencyOf("p99"), format: format.ns },
      { key: "max", title: "longest", value: (row) => row.latency?.max ?? null, format: format.ns },
      { key: "wait_mean", title: "waited, mean", format: format.ns },
      { key: "failures", title: "failed", value: (row) => row.failures ?? 0, format: format.count, level: badIfAny },
      { key: "timeouts", title: "timed out", value: (row) => row.timeouts ?? 0, format: format.count, level: (value, row) => (value > 0 && row.op !== "claim_meta" ? "warning" : "quiet") },
    ], { sort: "count" });
    this.partitionTable = new Table(byId("partitions"), "partition", [
      { key: "partition", title: "partition", text: true },
      { key: "samples", title: "samples", format: format.count },
      { key: "bytes", title: "bytes", format: format.bytes },
      { key: "fill", title: "capacity", value: fillOf, format: format.percent, meter: true, level: (value) => (value > 0.9 ? "error" : value > 0.7 ? "warning" : null) },
      { key: "ready", title: "ready, by task", text: true, value: (row) => Object.entries(row.ready).map(([task, ready]) => `${task} ${format.count(ready)}`).join(" · ") || "–" },
      { key: "waiting", title: "claims waiting", format: format.count },
      { key: "oldest_age_s", title: "oldest", format: format.duration },
      { key: "written", title: "written", format: format.count },
      { key: "cleared", title: "cleared", format: format.count },
      { key: "failed", title: "failed", format: format.count, level: badIfAny },
      { key: "never_cleared", title: "never cleared", format: format.count, level: (value) => (value > 0 ? "warning" : "quiet") },
    ], { sort: "samples" });
    this.fieldTable = new Table(byId("fields"), "id", [
      { key: "partition", title: "partition", text: true },
      { key: "field", title: "field", text: true },
      { key: "bytes", title: "bytes written", format: format.bytes },
      { key: "bytes_rate", title: "bytes/s", format: format.bytes },
    ], { sort: "bytes" });
    const flowOf = (key) => (row) => row.flow[key];
    const byReason = (key) => (row) => Object.entries(row.flow[key]).map(([reason, count]) => `${format.count(count)} ${reason}`).join(" · ") || "–";
    this.policyTable = new Table(byId("policies"), "partition", [
      { key: "partition", title: "partition", text: true },
      { key: "policy", title: "policy", text: true, value: (row) => row.flow.policy || "–" },
      { key: "version", title: "weight version", value: flowOf("version"), format: format.count },
      { key: "max_staleness", title: "bound", value: flowOf("max_staleness"), format: format.count },
      { key: "admitted", title: "admitted", value: flowOf("admitted"), format: format.count },
      { key: "waiting", title: "waiting for admission", value: flowOf("waiting"), format: format.count },
      { key: "evicted", title: "evicted, by reason", text: true, value: byReason("evicted") },
      { key: "closed_short", title: "groups closed short, by reason", text: true, value: byReason("closed_short") },
    ], { sort: "partition", descending: false });
    this.workerTable = new Table(byId("workers"), "worker", [
      { key: "worker", title: "worker", text: true },
      { key: "role", title: "role", text: true },
      { key: "host", title: "host", text: true },
      { key: "state", title: "state", text: true, level: (value) => (value === "silent" ? "error" : value === "gone" ? "quiet" : null) },
      { key: "rate", title: "ops/s", format: format.count },
      { key: "bytes_rate", title: "bytes/s", format: format.bytes },
      { key: "ops", title: "ops", format: format.count },
      { key: "p99", title: "p99", format: format.ns },
      { key: "failures", title: "failed", format: format.count, level: badIfAny },
      { key: "timeouts", title: "timed out", format: format.count },
      { key: "dropped", title: "events dropped", format: format.count, level: (value) => (value > 0 ? "warning" : "quiet") },
      { key: "seen_s", title: "last seen", format: format.age },
    ], { sort: "rate" });
    byId("partition-filter").addEventListener("input", (event) => this.partitionTable.setFilter(event.target.value));
    byId("worker-filter").addEventListener("input", (event) => this.workerTable.setFilter(event.target.value));
  }

  makeControls() {
    for (const button of byId("ranges").children) {
      button.addEventListener("click", () => this.setRange(button.dataset.range));
    }
    byId("pause").addEventListener("click", () => this.setPaused(!this.paused));
    byId("theme").addEventListener("click", toggleTheme);
    const titles = (table) => Object.entries(table).map(([key, entry]) => [key, entry.title]);
    segments(byId("throughput-of"), titles(THROUGHPUT), "samples", (key) => {
      this.chosen.throughput = key;
      this.plots.throughput.change(THROUGHPUT[key]);
      this.drawHistory();
    });
    segments(byId("held-in"), titles(HELD), "bytes", (key) => {
      this.chosen.held = key;
      this.plots.held.change(HELD[key]);
      this.drawHistory();
    });
    segments(byId("lifecycle-of"), [["oldest", "oldest in flight"], ["finished", "finished lately"]], "oldest", (key) => {
      this.chosen.lifecycle = key;
      if (this.view) this.drawLives();
    });
    byId("latency-op").addEventListener("change", () => this.drawHistory());
    byId("histogram-op").addEventListener("change", () => this.view && this.drawHistogram());
    byId("flow-partition").addEventListener("change", () => {
      this.hasChosenFlow = true;
      if (this.view) this.drawFlow();
    });
    document.addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("visibilitychange", () => !document.hidden && this.draw());
    this.pressRange();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape") {
      if (typing) event.target.blur();
      else if (this.history.zoom) this.setRange(this.history.range === Infinity ? "all" : String(this.history.range));
      return;
    }
    if (typing) return;
    const ranges = ["60", "300", "900", "3600", "all"];
    if (event.key >= "1" && event.key <= "5") this.setRange(ranges[Number(event.key) - 1]);
    else if (event.key === "p") this.setPaused(!this.paused);
    else if (event.key === "t") toggleTheme();
    else if (event.key === "/") {
      event.preventDefault();
      byId("worker-filter").focus();
    }
  }

  // What comes in.

  take(view) {
    if (this.paused) return;
    const before = this.view;
    this.view = view;
    if (!before || before.run.id !== view.run.id || before.run.started_ms !== view.run.started_ms) {
      this.history.zoom = null;
      this.history.clear();
      this.loadHistory();
    } else if (this.reload) {
      this.loadHistory();
    } else {
      this.history.append(view.points);
    }
    this.reload = false;
    this.showLink(view.feed);
    this.draw();
  }

  loadHistory() {
    return this.history.load(this.view.run.elapsed_s);
  }

  setLinked(linked) {
    this.linked = linked;
    // What was missed meanwhile is in the server's history.
    this.reload = true;
    this.showLink(this.status ?? { state: "waiting", text: "waiting" });
  }

  showLink(status) {
    this.status = status;
    const state = this.feed?.lost ? "lost" : this.paused ? "paused" : status.state === "live" || status.state === "ended" || status.state === "stale" ? status.state : "connecting";
    const texts = { lost: "reconnecting", paused: "paused", live: "live", stale: "old data", ended: "ended", connecting: "waiting" };
    setAttribute(byId("link"), "data-link", state);
    setText(byId("link-text"), texts[state]);
    setText(byId("source"), status.source ? `from ${status.source}` : "");
    this.showBanner(status, state);
  }

  showBanner(status, state) {
    const lines = [];
    if (state === "lost") lines.push(["error", "The connection to rlplane dash is lost; trying again. What is shown is old. If it was started again, open the address that it printed."]);
    else if (status.state === "stale") lines.push(["error", `Old data: ${status.text}.`]);
    else if (status.state === "searching" || status.state === "waiting") lines.push(["warning", `${status.text[0].toUpperCase()}${status.text.slice(1)}.`]);
    for (const finding of this.view?.health.findings ?? []) lines.push([finding.level, finding.text]);
    const banner = byId("banner");
    const text = JSON.stringify(lines);
    if (this.bannerText === text) return;
    this.bannerText = text;
    banner.hidden = !lines.length;
    setAttribute(banner, "data-level", lines.some(([level]) => level === "error") ? "error" : "warning");
    banner.replaceChildren(lines.length === 1 ? lines[0][1] : el("ul", {}, ...lines.slice(0, 6).map(([, line]) => el("li", {}, line))));
  }

  // What is shown.

  draw() {
    const view = this.view;
    if (!view || document.hidden) return;
    const { run } = view;
    setText(byId("state"), run.state);
    setAttribute(byId("state"), "data-state", run.state);
    setText(byId("run-id"), run.id);
    setText(byId("uptime"), format.duration(run.elapsed_s));
    document.title = `${run.id} · rlplane`;
    setAttribute(byId("report"), "href", `/report/${encodeURIComponent(run.id)}.html`);
    setText(byId("report"), run.final ? "Final report" : "Report");
    setOptions(byId("latency-op"), ["all", ...view.ops.map((op) => op.op)], ["all operations", ...view.ops.map((op) => op.op)]);
    setOptions(byId("histogram-op"), view.ops.map((op) => op.op));
    setOptions(byId("flow-partition"), view.flows.map((flow) => flow.partition));
    this.beside.update(view);
    this.drawFlow();
    this.drawHistogram();
    this.drawLives();
    this.opTable.update(view.ops);
    this.partitionTable.update(view.partitions);
    byId("fields-panel").hidden = !view.fields.length;
    this.fieldTable.update(view.fields);
    const policies = view.partitions.filter((part) => part.flow);
    byId("policies-panel").hidden = !policies.length;
    this.policyTable.update(policies);
    this.workerTable.update(view.workers);
    this.drawLog();
    this.drawHistory();
  }

  drawHistory() {
    const view = this.view;
    if (!view || document.hidden) return;
    const columns = this.history.columns;
    const start = view.run.started_ms / 1000;
    const span = this.history.span(view.run.elapsed_s);
    const times = columns.time_s.map((time) => start + time);
    const shown = [start + span[0], start + span[1]];
    const of = (lines) => lines.map((line) => columns[line.key]);
    this.tiles.update(view.totals, columns, span);
    this.steps.update(view, shown);
    this.plots.throughput.set(times, of(THROUGHPUT[this.chosen.throughput].lines), shown);
    this.plots.waiting.set(times, WAIT_KEYS.map((key) => columns[key]), shown);
    this.plots.held.set(times, of(HELD[this.chosen.held].lines), shown);
    this.plots.stale.set(times, [columns.stale_mean, columns.stale_p90], shown);
    const op = byId("latency-op").value || "all";
    const none = times.map(() => null);
    const quantiles = columns.latency[op] ?? [none, none, none];
    this.plots.latency.set(times, [...quantiles, op === "all" ? columns.latency_mean : none], shown);
  }

  drawFlow() {
    // The busiest one, until somebody chooses.
    if (!this.hasChosenFlow && this.view.flows.length) byId("flow-partition").value = this.view.flows[0].partition;
    const flow = this.view.flows.find((one) => one.partition === byId("flow-partition").value) ?? this.view.flows[0];
    this.flow.update(flow);
    const says = byId("flow-says");
    const [text, level] = describe(flow, this.view.run.final);
    setText(says, text);
    setAttribute(says, "data-level", level);
  }

  drawHistogram() {
    const op = this.view.ops.find((one) => one.op === byId("histogram-op").value) ?? this.view.ops[0];
    this.histogram.update(op?.latency);
  }

  drawLives() {
    this.lifecycle.update(this.view.lifecycle[this.chosen.lifecycle], this.chosen.lifecycle === "finished");
  }

  drawLog() {
    const lines = [...this.view.log].reverse();
    const text = JSON.stringify(lines);
    if (this.logText === text) return;
    this.logText = text;
    const log = byId("log");
    if (!lines.length) log.replaceChildren(el("li", { class: "empty" }, "No errors, no warnings."));
    else {
      log.replaceChildren(...lines.map((line) => el("li", { "data-level": line.level },
        el("time", {}, format.clock(line.time_ms)), el("span", { class: "who" }, line.worker || "aggregator"),
        el("span", { class: "what" }, line.count > 1 ? `${line.text} (${line.count} times since ${format.clock(line.first_ms)})` : line.text))));
    }
  }

  // What people choose.

  setRange(range) {
    this.history.zoom = null;
    this.history.range = range === "all" ? Infinity : Number(range);
    this.pressRange();
    if (this.view) {
      this.drawHistory();
      this.loadHistory();
    }
  }

  zoom(from, to) {
    const start = this.view.run.started_ms / 1000;
    this.history.zoom = [from - start, to - start];
    this.pressRange();
    this.drawHistory();
    this.loadHistory();
  }

  pressRange() {
    const pressed = this.history.zoom ? null : this.history.range === Infinity ? "all" : String(this.history.range);
    for (const button of byId("ranges").children) setAttribute(button, "aria-pressed", button.dataset.range === pressed);
  }

  setPaused(paused) {
    this.paused = paused;
    this.reload = true;
    setAttribute(byId("pause"), "aria-pressed", paused);
    setText(byId("pause"), paused ? "Paused" : "Pause");
    this.showLink(this.status ?? { state: "waiting", text: "waiting" });
  }
}

function describe(flow, final) {
  if (!flow) return ["", null];
  if (final) return ["the run has ended", null];
  if (flow.holdup === "producers") return ["all tasks wait for the producers", null];
  if (flow.holdup) {
    const task = flow.tasks.find((one) => one.task === flow.holdup);
    return [`${flow.holdup} holds everything up: ${format.count(task.ready)} samples wait for it`, "warning"];
  }
  return ["every stage keeps up", null];
}

startTheme();
new Page();
