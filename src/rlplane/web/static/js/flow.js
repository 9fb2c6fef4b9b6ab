// Producers → partition → tasks, stage by stage → cleared, with live rates on the edges and the stage that holds
// everything up.

import { el, setAttribute, setText, svg } from "./dom.js";
import * as format from "./format.js";

const BOX = { height: 62, gap: 22, least: 118, most: 240 };
const EDGE = { least: 58, most: 150 };

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
    const shape = JSON.stringify([width, flow.partition, flow.tasks.map((task) => [task.task, task.after])]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.draw(flow, width);
    }
    this.fill(flow);
  }

  draw(flow, width) {
    const place = placeAcross(flow, width) ?? placeDown(flow, width);
    this.root = svg("svg", {
      viewBox: `0 0 ${width} ${place.height}`, height: place.height, role: "img",
      "aria-label": `Flow of partition ${flow.partition}`,
    });
    this.edges = place.edges.map((edge) => {
      const path = edge.path;
      return {
        ...edge,
        track: svg("path", { class: "edge", d: path }),
        flow: svg("path", { class: "edge-flow", d: path }),
        rate: svg("text", { class: "rate", x: edge.x, y: edge.y, "text-anchor": edge.anchor ?? "middle" }),
      };
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
    const most = Math.max(1, flow.write_rate ?? 0, ...flow.tasks.map((task) => task.rate));
    this.edges.forEach((edge) => {
      const known = edge.to === null ? flow.clear_rate : edge.to < 0 ? flow.write_rate : flow.tasks[edge.to].rate;
      const rate = known ?? 0;
      const thick = rate > 0 ? 2 + 5 * Math.sqrt(rate / most) : 1.5;
      setAttribute(edge.track, "stroke-width", (thick + 2.5).toFixed(1));
      setAttribute(edge.flow, "stroke-width", thick.toFixed(1));
      setAttribute(edge.flow, "data-still", rate <= 0);
      setAttribute(edge.flow, "data-pace", rate > 0.66 * most ? 3 : rate > 0.25 * most ? 2 : 1);
      setText(edge.rate, edge.labelled ? format.perSecond(known) : "");
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
      setAttribute(part.root, "data-starved", Boolean(task.waiting));
      setText(part.title, task.asks ? `${task.task}: claims samples ${task.asks}` : task.task);
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
  const title = svg("title", {}, name);
  const root = svg("g", { class: "node", "data-name": name }, title,
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
  return { root, title, small, flag, level, backlog, spot };
}

// Where the edges go: [from, to] as indices of tasks, -1 for the partition and null for what is cleared.
function connections(flow) {
  const at = (name) => flow.tasks.findIndex((task) => task.task === name);
  const pairs = flow.tasks.flatMap((task, to) => (task.after.length ? task.after.map((name) => [at(name), to]) : [[-1, to]]));
  const ends = flow.tasks.map((_, from) => from).filter((from) => !pairs.some((pair) => pair[0] === from));
  return [...pairs, ...(flow.tasks.length ? ends : [-1]).map((from) => [from, null])];
}

// A task is reached by one rate, however many edges lead to it.
function labelled(pairs, at) {
  const to = pairs[at][1];
  return to !== null && pairs.findIndex((pair) => pair[1] === to) === at;
}

function placeAcross(flow, width) {
  const stages = flow.tasks.reduce((most, task) => Math.max(most, task.stage + 1), 0);
  const columns = stages + 3;
  const wide = Math.min(BOX.most, (width - 2 - (columns - 1) * EDGE.least) / columns);
  if (wide < BOX.least) return null;
  const gap = Math.min(EDGE.most, (width - 2 - columns * wide) / (columns - 1));
  const left = (column) => 1 + column * (wide + gap);
  const inStage = Array.from({ length: stages }, (_, stage) => flow.tasks.filter((task) => task.stage === stage));
  const number = Math.max(1, ...inStage.map((tasks) => tasks.length));
  const step = BOX.height + BOX.gap;
  const height = Math.max(150, number * step - BOX.gap + 44);
  const middle = height / 2;
  const spot = (column, y, h = BOX.height) => ({ x: left(column), y, width: wide, height: h });
  const producers = spot(0, middle - BOX.height / 2);
  const partition = spot(1, middle - 44, 88);
  const tasks = flow.tasks.map((task) => {
    const beside = inStage[task.stage];
    return spot(2 + task.stage, middle - (beside.length * step - BOX.gap) / 2 + beside.indexOf(task) * step);
  });
  const cleared = spot(columns - 1, middle - BOX.height / 2);
  const pairs = connections(flow);
  const edges = [
    { ...across(producers, partition), to: -1, labelled: true },
    ...pairs.map(([from, to], at) => ({
      ...across(from < 0 ? partition : tasks[from], to === null ? cleared : tasks[to], from < 0), to, labelled: labelled(pairs, at),
    })),
  ];
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
  const edge = (path, x, y) => ({ path, x, y, anchor: "start" });
  const pairs = connections(flow);
  const edges = [
    { ...edge(`M60 ${producers.y + producers.height} L60 ${partition.y}`, 72, (producers.y + producers.height + partition.y) / 2 + 4), to: -1, labelled: true },
    ...pairs.map(([from, to], at) => {
      const end = to === null ? cleared : tasks[to];
      const begin = from < 0 ? partition : tasks[from];
      const x = from < 0 ? 22 : begin.x + 20;
      const down = `M${x} ${begin.y + begin.height}`;
      const path = to === null ? `${down} L${x} ${end.y}`
        : from < 0 ? `${down} L22 ${end.y + end.height / 2} L${end.x} ${end.y + end.height / 2}` : `${down} L${x} ${end.y}`;
      return { ...edge(path, x + 10, to === null ? end.y - 8 : end.y - 6), to, labelled: labelled(pairs, at) };
    }),
  ];
  return { height: cleared.y + cleared.height + 4, producers, partition, tasks, cleared, edges };
}
