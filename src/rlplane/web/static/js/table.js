// A table that sorts by any column, by mouse or keyboard, and keeps its place while the figures change.

import { el, setAttribute, setText } from "./dom.js";

const FIRST_ROWS = 100;

export class Table {
  // `columns` are {key, title, text?, format?, value?, level?, meter?}; `id` names the key of a row.
  constructor(box, id, columns, { sort, descending = true } = {}) {
    this.id = id;
    this.columns = columns;
    this.sort = sort ?? columns[0].key;
    this.descending = descending;
    this.filter = "";
    this.limit = FIRST_ROWS;
    this.rows = [];
    this.made = new Map();
    this.body = el("tbody");
    this.heads = columns.map((column) =>
      el("th", { scope: "col", class: column.text ? "text" : null },
        el("button", { type: "button", onclick: () => this.sortBy(column.key) }, column.title)));
    this.more = el("button", { type: "button", onclick: () => { this.limit = Infinity; this.draw(); } });
    this.moreBox = el("div", { class: "more" }, this.more);
    this.empty = el("p", { class: "empty" }, "Nothing yet.");
    box.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...this.heads)), this.body), this.empty, this.moreBox);
  }

  sortBy(key) {
    this.descending = key === this.sort ? !this.descending : !this.columns.find((column) => column.key === key).text;
    this.sort = key;
    this.draw();
  }

  setFilter(text) {
    this.filter = text.toLowerCase();
    this.draw();
  }

  update(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const column = this.columns.find((candidate) => candidate.key === this.sort);
    const read = column.value ?? ((row) => row[column.key]);
    const sign = this.descending ? -1 : 1;
    const fits = (row) => !this.filter || this.columns.some((candidate) =>
      candidate.text && String(row[candidate.key] ?? "").toLowerCase().includes(this.filter));
    const sorted = this.rows.filter(fits).sort((one, other) => {
      const left = read(one) ?? -Infinity;
      const right = read(other) ?? -Infinity;
      if (left === right) return String(one[this.id]) < String(other[this.id]) ? -1 : 1;
      return (left < right ? -1 : 1) * sign;
    });
    const shown = sorted.slice(0, this.limit);
    const used = new Set();
    shown.forEach((row, at) => {
      const key = String(row[this.id]);
      used.add(key);
      const line = this.line(key);
      this.fill(line, row);
      if (this.body.children[at] !== line.root) this.body.insertBefore(line.root, this.body.children[at] ?? null);
    });
    for (const [key, line] of this.made) {
      if (!used.has(key)) {
        line.root.remove();
        this.made.delete(key);
      }
    }
    this.heads.forEach((head, at) => setAttribute(head, "aria-sort",
      this.columns[at].key === this.sort ? (this.descending ? "descending" : "ascending") : null));
    this.empty.hidden = shown.length > 0;
    setText(this.empty, this.filter ? "Nothing fits the filter." : "Nothing yet.");
    this.moreBox.hidden = shown.length === sorted.length;
    setText(this.more, `Show all ${sorted.length}`);
  }

  line(key) {
    let line = this.made.get(key);
    if (!line) {
      const cells = this.columns.map((column) => {
        const meter = column.meter ? el("meter", { min: 0, max: 1, high: 0.9, low: 0.7, optimum: 0 }) : null;
        const text = el("span");
        return { root: el("td", { class: column.text ? "text" : null }, meter, text), meter, text };
      });
      line = { root: el("tr", {}, ...cells.map((cell) => cell.root)), cells };
      this.made.set(key, line);
    }
    return line;
  }

  fill(line, row) {
    this.columns.forEach((column, at) => {
      const cell = line.cells[at];
      const value = column.value ? column.value(row) : row[column.key];
      setText(cell.text, column.format ? column.format(value, row) : String(value ?? "–"));
      if (column.text) setAttribute(cell.root, "title", String(value ?? ""));
      if (column.level) setAttribute(cell.root, "data-level", column.level(value, row));
      if (cell.meter) {
        cell.meter.hidden = value === null || value === undefined;
        cell.meter.value = value ?? 0;
      }
    });
  }
}
