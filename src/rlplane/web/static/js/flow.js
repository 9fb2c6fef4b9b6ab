// Producers → partition → tasks → cleared, with live rates on the edges and the stage that holds everything up.

import { el, setAttribute, setText, svg } from "./dom.js";
import * as format from "./format.js";

const BOX = { height: 62, gap: 16 };
const NARROW = 700;

export class FlowPicture {
  constructor(box) {
    this.box = box;
    this.shape = "";
    new ResizeObserver(() => this.flow && this.update(this.flow)).observe(box);
  }

  update(flow) {
    this.flow = flow;
    if (!flow) {
      this.shape = "";
      this.box.replaceChildren(el("p", { class: "empty" }, "No partition has been seen yet."));
      return;
    }
    const width = Math.max(300, this.box.clientWidth);
    const shape = JSON.stringify([width, flow.partition, flow.tasks.map((task) => task.task)]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.draw(flow, width);
    }
    this.fill(flow);
  }

  draw(flow, width) {
    const place = width < NARROW ? placeDown(flow, width) : placeAcross(flow, width);
    this.root = svg("svg", {
      viewBox: `0 0 ${width} ${place.height}`, height: place.height, role: "img",
      "aria-label": `Flow of partition ${flow.partition}`,
    });
    this.edges = place.edges.map((edge) => {
      const path = edge.path;
      const parts = {
        track: svg("path", { class: "edge", d: path }),
        flow: svg("path", { class: "edge-flow", d: path }),
        rate: svg("text", { class: "rate", x: edge.x, y: edge.y, "text-anchor": edge.anchor ?? "middle" }),
      };
      return parts;
    });
    this.producers = node(place.producers, "Producers");
    this.partition = node(place.partition, flow.partition, true);
    this.tasks = place.tasks.map((spot, at) => node(spot, flow.tasks[at].task, false, true));
    this.cleared = node(place.cleared, "Cleared");
    this.root.append(
      ...this.edges.flatMap((edge) => [edge.track, edge.flow]),
      ...[this.producers, this.partition, ...this.tasks, this.cleared].map((part) => part.root),
      ...this.edges.map((edge) => edge.rate),
    );
    this.box.replaceChildren(this.root);
  }

  fill(flow) {
    const rates = [flow.write_rate, ...flow.tasks.map((task) => task.rate), ...flow.tasks.map(() => null)];
    const share = flow.tasks.length ? flow.clear_rate / flow.tasks.length : flow.clear_rate;
    const most = Math.max(1, flow.write_rate, ...flow.tasks.map((task) => task.rate));
    this.edges.forEach((edge, at) => {
      const shown = rates[at] ?? null;
      const rate = shown ?? share;
      const thick = rate > 0 ? 2 + 5 * Math.sqrt(rate / most) : 1.5;
      setAttribute(edge.track, "stroke-width", (thick + 2.5).toFixed(1));
      setAttribute(edge.flow, "stroke-width", thick.toFixed(1));
      setAttribute(edge.flow, "data-still", rate <= 0);
      setAttribute(edge.flow, "data-pace", rate > 0.66 * most ? 3 : rate > 0.25 * most ? 2 : 1);
      setText(edge.rate, shown === null ? "" : format.perSecond(shown));
    });
    setText(this.producers.small, `${format.perSecond(flow.write_rate)} written`);
    holdup(this.producers, flow.holdup === "producers", "hold everything up");
    setText(this.partition.small, `${format.count(flow.samples)} samples · ${format.bytes(flow.bytes)}`);
    setText(this.partition.flag, flow.fill === null ? "" : `${format.percent(flow.fill)} full`);
    const level = Math.min(1, Math.max(0, flow.fill ?? 0));
    setAttribute(this.partition.level, "width", (this.partition.spot.width * level).toFixed(1));
    setAttribute(this.partition.root, "data-full", level > 0.9);
    const deepest = Math.max(1, ...flow.tasks.map((task) => task.ready ?? 0));
    flow.tasks.forEach((task, at) => {
      const part = this.tasks[at];
      const waiting = task.waiting ? ` · ${format.count(task.waiting)} wait` : "";
      setText(part.small, task.ready === null
        ? `${format.count(task.claimed)} claimed` : `${format.count(task.ready)} ready${waiting}`);
      const room = part.spot.width - 24;
      setAttribute(part.backlog, "width", (room * Math.min(1, (task.ready ?? 0) / deepest)).toFixed(1));
      setAttribute(part.root, "data-starved", Boolean(task.waiting) && !task.ready);
      holdup(part, flow.holdup === task.task, "holds everything up");
    });
    setText(this.cleared.small, format.perSecond(flow.clear_rate));
  }
}

function holdup(part, held, text) {
  setAttribute(part.root, "data-holdup", held);
  setText(part.flag, held ? text : "");
}

function node(spot, name, tank = false, queue = false) {
  const { x, y, width, height } = spot;
  const room = Math.floor((width - 24) / 7.4);
  const short = name.length > room ? `${name.slice(0, room - 1)}…` : name;
  const small = svg("text", { class: "small", x: x + 12, y: y + 40 });
  const flag = svg("text", { class: tank ? "share" : "flag", x: x + width - 12, y: tank ? y + height - 10 : y - 5, "text-anchor": "end" });
  const root = svg("g", { class: "node" }, svg("title", {}, name),
    svg("rect", { class: "box", x, y, width, height, rx: 10 }));
  let level = null;
  let backlog = null;
  if (tank) {
    level = svg("rect", { class: "fill", x, y, width: 0, height, rx: 10 });
    root.append(level);
  }
  root.append(svg("text", { class: "name", x: x + 12, y: y + 22 }, short), small, flag);
  if (queue) {
    backlog = svg("rect", { class: "backlog-level", x: x + 12, y: y + height - 13, width: 0, height: 5, rx: 2.5 });
    root.append(svg("rect", { class: "backlog", x: x + 12, y: y + height - 13, width: width - 24, height: 5, rx: 2.5 }), backlog);
  }
  return { root, small, flag, level, backlog, spot };
}

function placeAcross(flow, width) {
  const number = Math.max(1, flow.tasks.length);
  const height = Math.max(150, number * BOX.height + (number - 1) * (BOX.gap + 6) + 44);
  const middle = height / 2;
  const side = Math.min(170, width * 0.16);
  const gap = (width - 2 * side - 2 * Math.min(250, width * 0.22)) / 3;
  const wide = Math.min(250, width * 0.22);
  const spot = (x, y, w, h = BOX.height) => ({ x, y, width: w, height: h });
  const producers = spot(1, middle - BOX.height / 2, side);
  const partition = spot(side + gap, middle - 44, wide, 88);
  const left = side + 2 * gap + wide;
  const step = BOX.height + BOX.gap + 6;
  const top = middle - (number * step - BOX.gap - 6) / 2;
  const tasks = flow.tasks.map((_, at) => spot(left, top + at * step, wide));
  const cleared = spot(width - side - 1, middle - BOX.height / 2, side);
  const edges = [
    across(producers, partition),
    ...tasks.map((task) => across(partition, task, true)),
    ...tasks.map((task) => across(task, cleared)),
  ];
  if (!tasks.length) edges.push(across(partition, cleared));
  return { height, producers, partition, tasks, cleared, edges };
}

function across(from, to, nearEnd = false) {
  const x1 = from.x + from.width;
  const y1 = from.y + from.height / 2;
  const x2 = to.x;
  const y2 = to.y + to.height / 2;
  const bend = (x2 - x1) / 2;
  // A label sits where the curves have come apart.
  const at = nearEnd ? 0.72 : 0.5;
  const t = (a, b, c, d) => (1 - at) ** 3 * a + 3 * (1 - at) ** 2 * at * b + 3 * (1 - at) * at ** 2 * c + at ** 3 * d;
  return {
    path: `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`,
    x: t(x1, x1 + bend, x2 - bend, x2),
    y: t(y1, y1, y2, y2) - 9,
  };
}

function placeDown(flow, width) {
  const inner = width - 8;
  const step = BOX.height + 34;
  const spot = (at, h = BOX.height) => ({ x: 4, y: 20 + at * step, width: inner, height: h });
  const producers = spot(0);
  const partition = spot(1, 76);
  const tasks = flow.tasks.map((_, at) => {
    const place = spot(2 + at);
    return { ...place, x: 44, y: place.y + 14, width: inner - 40 };
  });
  const last = spot(2 + flow.tasks.length);
  const cleared = { ...last, y: last.y + 14 };
  const down = (from, to, x) => ({
    path: `M${x} ${from.y + from.height} L${x} ${to.y}`, x: x + 12, y: (from.y + from.height + to.y) / 2 + 4, anchor: "start",
  });
  const branch = (to) => ({
    path: `M22 ${partition.y + partition.height} L22 ${to.y + to.height / 2} L44 ${to.y + to.height / 2}`,
    x: to.x + 4, y: to.y - 6, anchor: "start",
  });
  const collect = (from) => ({ path: `M22 ${from.y + from.height / 2} L22 ${cleared.y}`, x: 30, y: cleared.y - 8, anchor: "start" });
  const edges = [down(producers, partition, 60), ...tasks.map(branch), ...tasks.map(collect)];
  if (!tasks.length) edges.push(down(partition, cleared, 60));
  return { height: cleared.y + cleared.height + 4, producers, partition, tasks, cleared, edges };
}
