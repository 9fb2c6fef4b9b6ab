// Training steps: which share of a step the plane took and on what, and the user's own numbers.

import { byId, el, setOptions, setText } from "./dom.js";
import * as format from "./format.js";
import { TimePlot } from "./plots.js";
import { Table } from "./table.js";

const SHARES = [
  { key: "waiting", name: "waiting", colour: "--amber" },
  { key: "round_trips", name: "round trips", colour: "--blue" },
  { key: "bytes", name: "bytes", colour: "--teal" }];
const SCALAR = [{ name: "value", colour: "--violet" }];

export class TrainingSteps {
  constructor(onZoom) {
    this.shares = new TimePlot(byId("plot-steps"), { lines: SHARES, format: format.share, onZoom });
    this.scalar = new TimePlot(byId("plot-scalar"), { lines: SCALAR, format: format.count, onZoom });
    const share = (key, title) => ({ key, title, format: format.share });
    this.table = new Table(byId("step-ops"), "op", [
      { key: "op", title: "operation", text: true },
      { key: "count", title: "calls per step", format: format.count },
      share("plane", "share of the step"), share("waiting", "waiting"), share("round_trips", "round trips"), share("bytes", "bytes"),
    ], { sort: "plane" });
    byId("scalar-name").addEventListener("change", () => this.drawScalar());
  }

  redraw() {
    this.shares.redraw();
    this.scalar.redraw();
  }

  update(view, shown) {
    this.view = view;
    this.shown = shown;
    const { totals, last, ops, points, scalars } = view.steps;
    const box = byId("steps-panel");
    box.hidden = !totals.count && !scalars.length;
    if (box.hidden) return;
    setText(byId("steps-says"), totals.count ? describe(totals, last) : "");
    byId("steps-of").hidden = !totals.count;
    this.table.update(ops);
    const start = view.run.started_ms / 1000;
    const marked = points.filter((point) => point.seconds > 0);
    this.shares.set(marked.map((point) => start + point.time_s), SHARES.map(({ key }) => marked.map((point) => point[key])), shown);
    byId("scalars-box").hidden = !scalars.length;
    setOptions(byId("scalar-name"), scalars);
    this.drawScalar();
  }

  drawScalar() {
    const name = byId("scalar-name").value;
    const points = this.view.steps.points.filter((point) => name in point.scalars);
    const start = this.view.run.started_ms / 1000;
    this.scalar.set(points.map((point) => start + point.time_s), [points.map((point) => point.scalars[name])], this.shown);
  }
}

function describe(totals, last) {
  const share = (part) => format.share(totals[part]);
  const tokens = totals.tokens_per_s ? `; ${format.count(totals.tokens_per_s)} tokens/s` : "";
  return `step ${last ?? "–"}: ${share("plane")} of a step in the plane (waiting ${share("waiting")}, round trips ${share("round_trips")}, bytes ${share("bytes")})${tokens}`;
}
