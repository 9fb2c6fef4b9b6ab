// The lifecycle of single samples: written, claimed by one task after the other, cleared.

import { el, svg } from "./dom.js";
import * as format from "./format.js";

const ROW = 21;
const MAX_ROWS = 12;
const LABEL = 128;

export class SampleLifecycle {
  constructor(box) {
    this.box = box;
    new ResizeObserver(() => this.samples && this.update(this.samples, this.finished)).observe(box);
  }

  update(samples, finished) {
    this.samples = samples;
    this.finished = finished;
    if (!samples.length) {
      this.box.replaceChildren(el("p", { class: "empty" }, finished
        ? "No tracked sample has been cleared yet."
        : "No tracked sample is in flight. Samples of the partitions in observability.track_partitions are shown here."));
      return;
    }
    const rows = samples.slice(0, MAX_ROWS);
    const tasks = [...new Set(rows.flatMap((sample) => sample.claims.map((claim) => claim.task)))];
    const width = Math.max(280, this.box.clientWidth);
    const longest = Math.max(0.001, ...rows.map((sample) => sample.age_s));
    const x = (seconds) => LABEL + ((width - LABEL - 58) * seconds) / longest;
    const height = rows.length * ROW + 22;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Sample lifecycle" });
    rows.forEach((sample, at) => this.drawRow(root, sample, at * ROW, x, tasks));
    for (const share of [0, 0.5, 1]) {
      root.append(svg("text", { x: x(longest * share), y: height - 5, "text-anchor": "middle" }, format.duration(longest * share)));
    }
    const named = (name, css) => el("span", {}, el("i", { class: css }), name);
    this.box.replaceChildren(root, el("div", { class: "key" },
      named("written, not claimed", "wait"), ...tasks.slice(0, 5).map((task, at) => named(`claimed by ${task}`, `c${at}`))));
  }

  drawRow(root, sample, top, x, tasks) {
    const id = sample.id.length > 15 ? `${sample.id.slice(0, 14)}…` : sample.id;
    const details = `${sample.id} in ${sample.partition}` + (sample.worker ? `, written by ${sample.worker}` : "")
      + (sample.weight_version === null ? "" : `, weight version ${sample.weight_version}`);
    const row = svg("g", {}, svg("title", {}, details), svg("text", { class: "id", x: 0, y: top + 14 }, id));
    const bar = (from, to, css) => row.append(svg("rect", {
      class: css, x: x(from), y: top + 4, width: Math.max(1.5, x(to) - x(from)), height: 12, rx: 3 }));
    const timed = sample.claims.filter((claim) => claim.after_s !== null);
    if (sample.failed) bar(0, sample.age_s, "failed");
    else if (sample.claims.length && !timed.length) bar(0, sample.age_s, "unknown");
    else {
      const stops = [...timed].sort((one, other) => one.after_s - other.after_s);
      let from = 0;
      let css = "wait";
      for (const stop of stops) {
        bar(from, Math.min(stop.after_s, sample.age_s), css);
        from = stop.after_s;
        css = `c${tasks.indexOf(stop.task) % 5}`;
      }
      bar(from, sample.age_s, css);
    }
    if (sample.cleared) row.append(svg("line", { class: "end", x1: x(sample.age_s) + 2, x2: x(sample.age_s) + 2, y1: top + 3, y2: top + 17 }));
    row.append(svg("text", { x: x(sample.age_s) + 8, y: top + 14 }, format.duration(sample.age_s)));
    root.append(row);
  }
}
