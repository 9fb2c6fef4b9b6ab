// Lines over time, on uPlot: colours from the style sheet, one cursor over all plots, a drag looks closer.

import uPlot from "../vendor/uPlot.esm.js";
import { colour } from "./theme.js";

const HEIGHT = 212;
const AXIS_FONT = "12px system-ui, sans-serif"; // Whole pixels: uPlot scales the number with a pattern.
const BINARY_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const pad = (value) => String(value).padStart(2, "0");

function clockTicks(_, splits, __, ___, increment) {
  return splits.map((seconds) => {
    const time = new Date(seconds * 1000);
    const text = `${pad(time.getHours())}:${pad(time.getMinutes())}`;
    return increment < 60 ? `${text}:${pad(time.getSeconds())}` : text;
  });
}

export class TimePlot {
  // `lines` are {name, colour, fill?, dash?}; `format` writes a value of the y axis; `binary` ticks at powers of 2.
  constructor(box, { lines, format, binary = false, log = false, onZoom }) {
    this.box = box;
    this.format = format;
    this.span = [0, 1];
    this.lines = lines;
    this.log = log;
    this.binary = binary;
    this.onZoom = onZoom;
    this.make();
    new ResizeObserver(() => this.resize()).observe(box);
  }

  make() {
    this.box.replaceChildren();
    const axis = () => colour("--faint");
    const grid = { stroke: () => colour("--line"), width: 1 };
    const write = (value) => (value === null || value === undefined ? "–" : this.format(value));
    this.plot = new uPlot({
      width: Math.max(200, this.box.clientWidth),
      height: HEIGHT,
      padding: [10, 26, 0, 0],
      cursor: {
        sync: { key: "rlplane" },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        y: false,
      },
      scales: {
        x: { time: true, range: () => this.span },
        y: this.log
          ? { distr: 3, range: (_, low, high) => logRange(low, high) }
          : { range: (_, __, high) => [0, high > 0 ? high * 1.12 : 1] },
      },
      axes: [
        { stroke: axis, grid, ticks: { show: false }, font: AXIS_FONT, values: clockTicks, space: 84, size: 30 },
        { stroke: axis, grid, ticks: { show: false }, font: AXIS_FONT, size: 68,
          values: (_, splits) => splits.map(write),
          splits: this.log ? decades : undefined, incrs: this.binary ? BINARY_STEPS : undefined },
      ],
      series: [
        { label: "time", value: (_, value) => (value ? new Date(value * 1000).toLocaleTimeString("en-GB") : "–") },
        ...this.lines.map((line) => ({
          label: line.name,
          stroke: () => colour(line.colour),
          fill: line.fill ? () => colour(line.fill) : undefined,
          width: 1.8,
          dash: line.dash,
          spanGaps: true,
          points: { show: false },
          value: (_, value) => write(value),
        })),
      ],
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 8) return;
          const from = plot.posToVal(plot.select.left, "x");
          const to = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.onZoom(from, to);
        }],
      },
    }, [[], ...this.lines.map(() => [])], this.box);
  }

  // Other lines or another unit: made anew.
  change({ lines, format, binary = false }) {
    this.lines = lines;
    this.binary = binary;
    this.format = format;
    this.make();
  }

  set(times, columns, span) {
    this.span = span;
    this.plot.setData([times, ...columns]);
    if (this.plot.cursor.left === undefined || this.plot.cursor.left < 0) {
      this.plot.setLegend({ idx: times.length ? times.length - 1 : null }, false);
    }
  }

  resize() {
    const width = this.box.clientWidth;
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  redraw() {
    this.plot.redraw();
    for (const [at, line] of this.lines.entries()) {
      const marker = this.box.querySelectorAll(".u-series .u-marker")[at + 1];
      if (marker) marker.style.borderColor = marker.style.background = colour(line.colour);
    }
  }
}

function logRange(low, high) {
  if (!(high > 0)) return [1e5, 1e7];
  const bottom = 10 ** Math.floor(Math.log10(Math.max(low, 1)));
  const top = 10 ** Math.ceil(Math.log10(high * 1.01));
  return [bottom, Math.max(top, bottom * 10)];
}

function decades(_, __, low, high) {
  const found = [];
  for (let power = Math.round(Math.log10(low)); 10 ** power <= high * 1.001; power += 1) found.push(10 ** power);
  return found;
}
