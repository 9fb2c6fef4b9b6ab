// The past of the run, as columns: fetched for the range that is looked at, then fed by the stream.

const MAX_POINTS = 2400;
const PLAIN = ["time_s", "seconds", "ops", "bytes", "failures", "written", "claimed", "cleared",
  "samples_held", "bytes_held", "latency_mean", "stale_mean", "stale_p90",
  "waiting", "wait_mean", "wait_p50", "wait_p90", "wait_p99"];

export class History {
  constructor(onChange) {
    this.onChange = onChange;
    this.range = 300; // Seconds up to now, or Infinity for the whole run.
    this.zoom = null; // [from, to] in seconds since the start, when looking back.
    this.runId = null;
    this.clear();
  }

  clear() {
    this.columns = Object.fromEntries(PLAIN.map((name) => [name, []]));
    this.columns.latency = {};
  }

  get length() {
    return this.columns.time_s.length;
  }

  // The span that is shown, in seconds since the start of the run.
  span(elapsed) {
    if (this.zoom) return this.zoom;
    // A run that is younger than the range is shown whole, and not at the edge of an empty plot.
    const end = Math.max(10, elapsed);
    return [Math.max(0, end - this.range), end];
  }

  async load(elapsed) {
    const [from, to] = this.span(elapsed);
    const query = new URLSearchParams({ points: "900", start_s: String(from - 2) });
    if (this.zoom) query.set("end_s", String(to + 2));
    const asked = (this.asked = Symbol("request"));
    try {
      const answer = await fetch(`/api/history?${query}`);
      if (!answer.ok) return;
      const { columns } = await answer.json();
      if (asked !== this.asked) return; // A later request has overtaken this one.
      this.columns = columns;
      this.onChange();
    } catch {
      // The stream says that the connection is lost, and loads again when it is back.
    }
  }

  append(added) {
    const first = added.time_s.length;
    if (!first || this.zoom) return;
    const last = this.columns.time_s.at(-1) ?? -Infinity;
    for (let at = 0; at < first; at += 1) {
      if (added.time_s[at] > last) this.appendOne(added, at);
    }
    if (this.length > MAX_POINTS) this.dropOldest(this.length - MAX_POINTS);
    this.onChange();
  }

  appendOne(added, at) {
    const before = this.length;
    for (const name of PLAIN) this.columns[name].push(added[name][at]);
    const latency = this.columns.latency;
    for (const op of Object.keys(added.latency)) {
      latency[op] ??= [0, 1, 2].map(() => new Array(before).fill(null));
    }
    for (const [op, quantiles] of Object.entries(latency)) {
      quantiles.forEach((column, which) => column.push(added.latency[op]?.[which][at] ?? null));
    }
  }

  dropOldest(number) {
    for (const name of PLAIN) this.columns[name].splice(0, number);
    for (const quantiles of Object.values(this.columns.latency)) {
      quantiles.forEach((column) => column.splice(0, number));
    }
  }
}
