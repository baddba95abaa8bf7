// What each cluster's first rank holds against its plan, and what its links are like.

import {byId, bytes, duration, el, mbits, show} from "./dom.js";
import {head} from "./panels.js";

const told = (value, how = bytes) => (value === undefined ? "-" : how(value));
const rate = (value) => `${mbits(value)} Mbit/s`;
const beside = (value, measured) => (measured === undefined ? rate(value)
  : `${mbits(value)} of ${mbits(measured)} Mbit/s measured`);

export function showMemory(rows) {
  const panel = byId("memory");
  panel.hidden = !rows.length;
  if (panel.hidden) return;
  const hasDevice = rows.some((row) => row.device_bytes !== undefined);
  table(panel, [
    ["cluster", (row) => String(row.cluster)],
    ["process", (row) => told(row.process_bytes)],
    ["outer state", (row) => told(row.outer_bytes)],
    ["planned", (row) => told(row.outer_planned_bytes)],
    ...(hasDevice ? [
      ["device", (row) => told(row.device_bytes)],
      ["tensors at most", (row) => told(row.device_peak_bytes)],
      ["of", (row) => told(row.device_total_bytes)],
    ] : []),
    ["planned for", (row) => Object.entries(row.plan).sort((a, b) => b[1] - a[1])
      .map(([name, size]) => `${name.replaceAll("_", " ")} ${bytes(size)}`).join(", ") || "-", "words"],
  ], rows);
}

export function showLinks(rows, count) {
  const panel = byId("links");
  panel.hidden = !rows.length;
  if (panel.hidden) return;
  show(panel.querySelector(".note"), count > rows.length
    ? `The ${rows.length} of ${count.toLocaleString("en")} whose last round trips were the longest.` : "");
  table(panel, [
    ["link", (row) => `${row.of} \u2192 ${row.to}`],
    ["round trip", (row) => told(row.round_trip_seconds, duration)],
    ["least", (row) => told(row.least_seconds, duration)],
    ["goes out", (row) => told(row.sent_bytes_per_second,
      (value) => beside(value, row.measured_bytes_per_second))],
    ["comes in", (row) => told(row.received_bytes_per_second, rate)],
    ["sent", (row) => told(row.sent_bytes)],
    ["received", (row) => told(row.received_bytes)],
  ], rows);
}

function table(panel, columns, rows) {
  head(panel);
  show(panel.querySelector(".scrolls"), el("table", {},
    el("thead", {}, el("tr", {}, columns.map(([name,, kind]) => el("th", {scope: "col", class: kind}, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, columns.map(([name, text, kind], at) =>
      el(at ? "td" : "th", {"data-name": name, class: kind, ...(at ? {} : {scope: "row"})}, text(row))))))));
}
