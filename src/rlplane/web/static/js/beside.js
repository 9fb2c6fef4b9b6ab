// A finished run of this machine beside the one that is shown: the same figures in two columns.

import { byId, el, setOptions, setText } from "./dom.js";

const REFRESH_MS = 10000;

export class Beside {
  constructor() {
    this.picker = byId("run-picker");
    this.picked = null;
    this.picker.addEventListener("change", () => this.pick(this.picker.value));
    this.load();
    setInterval(() => this.load(), REFRESH_MS);
  }

  async load() {
    const runs = await get("/api/runs");
    if (runs) setOptions(this.picker, ["", ...runs.map((run) => run.id)], ["no other run", ...runs.map((run) => run.id)]);
  }

  async pick(id) {
    this.picked = id ? await get(`/api/runs/${encodeURIComponent(id)}`) : null;
    byId("beside-panel").hidden = !this.picked;
    this.draw();
  }

  update(view) {
    this.view = view;
    this.draw();
  }

  draw() {
    if (!this.picked || !this.view) return;
    const own = this.view.figures;
    setText(byId("beside-says"), `${this.view.run.id} beside ${this.picked.id}`);
    const names = [...new Set([...Object.keys(own), ...Object.keys(this.picked.figures)])];
    const line = (name) => el("tr", {}, el("th", { class: "text", scope: "row" }, name),
      el("td", {}, own[name] ?? "–"), el("td", {}, this.picked.figures[name] ?? "–"));
    byId("beside").replaceChildren(
      el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "text" }, ""),
        el("th", {}, this.view.run.id), el("th", {}, this.picked.id))), el("tbody", {}, ...names.map(line))),
      el("p", {}, el("a", { href: `/report/${encodeURIComponent(this.picked.id)}.html`, target: "_blank", rel: "noopener" }, `The whole report of ${this.picked.id}`)));
  }
}

async function get(path) {
  try {
    const answer = await fetch(path);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null; // The stream says that the connection is lost.
  }
}
