// Elements and words. What comes from a run is put in as text, never as markup.

export function el(name, fields = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(fields)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null) made.append(child);
  }
  return made;
}

export const byId = (id) => document.getElementById(id);

// Replace children only where they differ, so that nothing loses its focus for the same again.
export function show(parent, ...children) {
  const made = el("div", {}, ...children);
  if (made.innerHTML !== parent.innerHTML) parent.replaceChildren(...made.childNodes);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const PREFIXES = ["", "k", "M", "G", "T", "P"];

export function number(value, digits = 4) {
  if (typeof value !== "number") return value === undefined || value === null ? "-" : String(value);
  const size = Math.abs(value);
  if (size >= 1e6) return scaled(value, "").trim();
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

// Bytes per second as lines are sold.
export function mbits(value) {
  return number(value * 8e-6, 3);
}

function scaled(value, unit) {
  let place = 0;
  while (Math.abs(value) >= 999.5 && place < PREFIXES.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${Number(value.toPrecision(3))} ${PREFIXES[place]}${unit}`;
}

export const bytes = (value) => scaled(value, "B");

export function duration(seconds) {
  if (seconds < 1) return `${Number((1000 * seconds).toPrecision(2))} ms`;
  if (seconds < 90) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function clock(seconds) {
  const when = new Date(1000 * seconds);
  const time = when.toLocaleTimeString([], {hour12: false});
  const isToday = when.toDateString() === new Date().toDateString();
  return isToday ? time : `${when.toISOString().slice(0, 10)} ${time}`;
}

const UNITS = {
  "number": (value) => number(value),
  "percent": (value) => `${Number((100 * value).toPrecision(4))} %`,
  "bytes": bytes,
  "bytes/s": (value) => `${bytes(value)}/s`,
  "seconds": duration,
  "steps": (value) => number(value),
};

export function inUnit(value, unit) {
  return typeof value === "number" ? UNITS[unit](value) : number(value);
}

// Ticks of an axis: shares that lie close together have the digits that tell them apart.
export function inSteps(ticks, unit) {
  if (unit !== "percent" || ticks.length < 2) return ticks.map((value) => inUnit(value, unit));
  const step = 100 * (ticks[1] - ticks[0]);
  const digits = [0, 1, 2, 3, 4, 5].find((n) => Math.abs(Number(step.toFixed(n)) - step) < 1e-3 * step) ?? 6;
  return ticks.map((value) => `${(100 * value).toFixed(digits)} %`);
}
