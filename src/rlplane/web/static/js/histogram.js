// The distribution of one operation's latency, on a logarithmic axis, with its percentiles.

import { el, svg } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 230;
const MARKS = ["p50", "p90", "p99"];

export class Histogram {
  constructor(box) {
    this.box = box;
    new ResizeObserver(() => this.latency && this.update(this.latency)).observe(box);
  }

  update(latency) {
    this.latency = latency;
    if (!latency || !latency.count || latency.edges.length < 2) {
      this.box.replaceChildren(el("p", { class: "empty" }, "No operation has finished yet."));
      return;
    }
    const width = Math.max(260, this.box.clientWidth);
    const { edges, counts } = latency;
    const low = Math.log(Math.max(1, edges[0]));
    const high = Math.max(low + 0.1, Math.log(Math.max(1, edges.at(-1))));
    const x = (value) => 8 + ((width - 16) * (Math.log(Math.max(1, value)) - low)) / (high - low);
    const floor = HEIGHT - 26;
    const most = Math.max(...counts);
    const y = (count) => floor - ((floor - 34) * count) / most;
    const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img",
      "aria-label": `Latency histogram of ${latency.count} operations` });
    root.append(svg("line", { class: "axis", x1: 0, x2: width, y1: floor, y2: floor }));
    counts.forEach((count, at) => {
      if (!count) return;
      const left = x(edges[at]);
      const wide = Math.max(1, x(edges[at + 1]) - left - 1.5);
      root.append(svg("rect", { class: "hbar", x: left, y: y(count), width: wide, height: floor - y(count), rx: 2 },
        svg("title", {}, `${format.ns(edges[at])} to ${format.ns(edges[at + 1])}: ${format.count(count)}`)));
    });
    for (const power of decades(edges[0], edges.at(-1))) {
      root.append(svg("text", { x: x(power), y: HEIGHT - 8, "text-anchor": "middle" }, format.ns(power)));
    }
    MARKS.forEach((name, row) => {
      const value = latency.percentiles[name];
      if (value === undefined) return;
      const at = x(value);
      const anchor = at > width - 90 ? "end" : "start";
      root.append(
        svg("line", { class: "mark", x1: at, x2: at, y1: 4 + row * 13, y2: floor }),
        svg("text", { class: "mark-name", x: at + (anchor === "end" ? -5 : 5), y: 13 + row * 13, "text-anchor": anchor },
          `${name} ${format.ns(value)}`));
    });
    const note = `${format.count(latency.count)} operations · mean ${format.ns(latency.mean)} · longest ${format.ns(latency.max)}`;
    this.box.replaceChildren(root, el("div", { class: "key" }, note + (latency.exact ? " · exact" : "")));
  }
}

function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(Math.max(1, low))); 10 ** power <= high; power += 1) found.push(10 ** power);
  return found.length ? found : [low, high];
}
