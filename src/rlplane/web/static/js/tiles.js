// The figures of now, each with its last minutes as a line.

import { el, setAttribute, setText, svg } from "./dom.js";
import * as format from "./format.js";

const TILES = [
  { key: "ops", title: "Operations",
    value: (t) => [format.count(t.ops_rate), "/s"], note: (t) => `${format.count(t.ops)} in all` },
  { key: "bytes", title: "Bandwidth",
    value: (t) => [format.bytes(t.bytes_rate), "/s"], note: (t) => `${format.bytes(t.bytes)} in all` },
  { key: "written", title: "Samples written",
    value: (t) => [format.count(t.written_rate), "/s"], note: (t) => `${format.perSecond(t.cleared_rate)} cleared` },
  { key: "bytes_held", title: "Held",
    value: (t) => [format.bytes(t.bytes_held), ""],
    note: (t) => `${format.count(t.samples_held)} samples · peak ${format.bytes(t.bytes_peak)}` },
  { key: "stale_mean", title: "Staleness at the claim",
    value: (t, last) => [last.stale_mean === null || last.stale_mean === undefined
      ? format.count(t.stale_p50) : last.stale_mean.toFixed(1), "versions"],
    note: (t) => `p99 ${format.count(t.stale_p99)} · version ${format.count(t.weight_version)}` },
  { key: "failures", title: "Failures",
    value: (t) => [format.count(t.failures), ""],
    note: (t) => `${format.count(t.timeouts)} timeouts · ${format.count(t.workers)}/${format.count(t.workers_all)} workers`,
    level: (t) => (t.failures_rate > 0 || t.failures > 0 ? "error" : null) },
];

export class Tiles {
  constructor(box) {
    this.parts = TILES.map((tile) => {
      const unit = el("small");
      const number = el("b", {}, el("span"), unit);
      const area = svg("path", { class: "spark-area" });
      const line = svg("path", { class: "spark-line" });
      const note = el("em");
      const root = el("div", { class: "tile", id: `tile-${tile.key}` }, el("span", {}, tile.title), number, note,
        svg("svg", { viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line));
      return { root, number: number.firstChild, unit, note, area, line };
    });
    box.replaceChildren(...this.parts.map((part) => part.root));
  }

  update(totals, columns, span) {
    const last = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column.at?.(-1)]));
    TILES.forEach((tile, at) => {
      const part = this.parts[at];
      const [number, unit] = tile.value(totals, last);
      setText(part.number, number);
      setText(part.unit, unit);
      setText(part.note, tile.note(totals));
      setAttribute(part.root, "data-level", tile.level?.(totals) ?? null);
      const path = sparkline(columns.time_s, columns[tile.key], span);
      setAttribute(part.line, "d", path);
      setAttribute(part.area, "d", path && `${path} V28 H${path.match(/^M([\d.]+)/)[1]} Z`);
    });
  }
}

function sparkline(times, values, [from, to]) {
  const points = [];
  const step = Math.max(1, Math.floor(times.length / 160));
  for (let at = 0; at < times.length; at += step) {
    if (times[at] >= from && values[at] !== null) points.push([times[at], values[at]]);
  }
  if (points.length < 2) return "";
  const high = Math.max(...points.map((point) => point[1])) || 1;
  const x = (time) => (100 * (time - from)) / (to - from);
  return points
    .map(([time, value], at) => `${at ? "L" : "M"}${x(time).toFixed(2)} ${(26 - (23 * value) / high).toFixed(2)}`)
    .join(" ");
}
