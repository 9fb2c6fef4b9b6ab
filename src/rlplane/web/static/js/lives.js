// The life of single samples: written, claimed by one task after the other, cleared.

import { el, svg } from "./dom.js";
import * as format from "./format.js";

const ROW = 21;
const MAX_ROWS = 12;
const LABEL = 128;

export class Lives {
  constructor(box) {
    this.box = box;
    new ResizeObserver(() => this.lives && this.update(this.lives, this.finished)).observe(box);
  }

  update(lives, finished) {
    this.lives = lives;
    this.finished = finished;
    if (!lives.length) {
      this.box.replaceChildren(el("p", { class: "empty" }, finished
        ? "No tracked sample has been cleared yet."
        : "No tracked sample is in flight. Samples of the partitions in observability.track_partitions are shown here."));
      return;
    }
    const rows = lives.slice(0, MAX_ROWS);
    const tasks = [...new Set(rows.flatMap((life) => life.claims.map((claim) => claim.task)))];
    const width = Math.max(280, this.box.clientWidth);
    const longest = Math.max(0.001, ...rows.map((life) => life.age_s));
    const x = (seconds) => LABEL + ((width - LABEL - 58) * seconds) / longest;
    const height = rows.length * ROW + 22;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Lives of samples" });
    rows.forEach((life, at) => this.drawRow(root, life, at * ROW, x, tasks));
    for (const share of [0, 0.5, 1]) {
      root.append(svg("text", { x: x(longest * share), y: height - 5, "text-anchor": "middle" }, format.duration(longest * share)));
    }
    const named = (name, css) => el("span", {}, el("i", { class: css }), name);
    this.box.replaceChildren(root, el("div", { class: "key" },
      named("written, not claimed", "wait"), ...tasks.slice(0, 5).map((task, at) => named(`claimed by ${task}`, `c${at}`))));
  }

  drawRow(root, life, top, x, tasks) {
    const id = life.id.length > 15 ? `${life.id.slice(0, 14)}…` : life.id;
    const details = `${life.id} in ${life.partition}` + (life.worker ? `, written by ${life.worker}` : "")
      + (life.weight_version === null ? "" : `, weight version ${life.weight_version}`);
    const row = svg("g", {}, svg("title", {}, details), svg("text", { class: "id", x: 0, y: top + 14 }, id));
    const bar = (from, to, css) => row.append(svg("rect", {
      class: css, x: x(from), y: top + 4, width: Math.max(1.5, x(to) - x(from)), height: 12, rx: 3 }));
    const timed = life.claims.filter((claim) => claim.after_s !== null);
    if (life.failed) bar(0, life.age_s, "failed");
    else if (life.claims.length && !timed.length) bar(0, life.age_s, "unknown");
    else {
      const stops = [...timed].sort((one, other) => one.after_s - other.after_s);
      let from = 0;
      let css = "wait";
      for (const stop of stops) {
        bar(from, Math.min(stop.after_s, life.age_s), css);
        from = stop.after_s;
        css = `c${tasks.indexOf(stop.task) % 5}`;
      }
      bar(from, life.age_s, css);
    }
    if (life.cleared) row.append(svg("line", { class: "end", x1: x(life.age_s) + 2, x2: x(life.age_s) + 2, y1: top + 3, y2: top + 17 }));
    row.append(svg("text", { x: x(life.age_s) + 8, y: top + 14 }, format.duration(life.age_s)));
    root.append(row);
  }
}
