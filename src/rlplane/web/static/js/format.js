// Numbers for people. The same rules as rlplane.viewing.units, so that page and terminal say the same.

const NONE = "–";

function scaled(value, base, units) {
  let size = value;
  for (const unit of units.slice(0, -1)) {
    if (Math.abs(size) < base - 0.5) return figures(size) + unit;
    size /= base;
  }
  return figures(size) + units[units.length - 1];
}

function figures(size) {
  if (Number.isInteger(size) || Math.abs(size) >= 100) return size.toFixed(0);
  return String(Number(size.toPrecision(3)));
}

export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 10000) {
    return Number.isInteger(value) || Math.abs(value) >= 100
      ? Math.round(value).toLocaleString("en-US")
      : String(Number(value.toPrecision(3)));
  }
  return scaled(value, 1000, ["", "k", "M", "G", "T", "P"]);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  return scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]);
}

export function ns(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 60e9 ? scaled(value, 1000, [" ns", " µs", " ms", " s"]) : duration(value / 1e9);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
  const minutes = Math.floor(seconds / 60);
  const pad = (value) => String(value).padStart(2, "0");
  if (minutes < 60) return `${minutes}m ${pad(Math.floor(seconds) % 60)}s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours}h ${pad(minutes % 60)}m` : `${Math.floor(hours / 24)}d ${hours % 24}h`;
}

export const age = (seconds) =>
  seconds === null || seconds === undefined ? NONE : seconds < 1 ? "now" : duration(seconds);

export const perSecond = (value) => (value === null || value === undefined ? NONE : `${count(value)}/s`);

export const percent = (share) => (share === null || share === undefined ? NONE : `${Math.round(100 * share)}%`);

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}

// A share that may be small, with two figures.
export function share(value) {
  if (value === null || value === undefined) return NONE;
  return `${Number((100 * value).toPrecision(2))}%`;
}
