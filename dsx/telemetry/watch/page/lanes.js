// The way of each fragment: a row each, bars in time. On the line: striped; there: plain; waited
// for: dark, with an edge. So it is read without colours.

import {bytes, clock, duration, el} from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 20;
const LABEL = 92;

function svg(name, fields, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(fields)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function drawLanes(parent, data) {
  const width = Math.max(parent.clientWidth, 240);
  const {lanes, span: [begin, end]} = data;
  const height = ROW * lanes.length + 22;
  const at = (when) => LABEL + ((when - begin) / Math.max(end - begin, 1e-9)) * (width - LABEL - 4);
  const stages = new Set(lanes.map((lane) => lane.stage)).size > 1;
  const picture = svg("svg", {width, height, role: "img", "aria-label": inWords(data)}, stripes());
  lanes.forEach((lane, row) => {
    const top = ROW * row + 3;
    const name = stages ? `stage ${lane.stage}, ${lane.fragment}` : `fragment ${lane.fragment}`;
    picture.append(svg("text", {x: 0, y: top + 12, class: "label"}, name),
      svg("line", {x1: LABEL, x2: width - 4, y1: top + 7, y2: top + 7, class: "trained"}));
    for (const bar of lane.bars) picture.append(drawBar(bar, at, top, name));
  });
  for (const part of [0, 0.5, 1]) {
    const when = begin + part * (end - begin);
    const anchor = ["start", "middle", "end"][2 * part];
    picture.append(svg("text", {x: at(when), y: height - 5, class: "label", "text-anchor": anchor}, clock(when)));
  }
  parent.replaceChildren(picture, key());
}

function drawBar(bar, at, top, name) {
  const waitedFrom = bar.applied - bar.waited;
  const lineEnd = Math.min(bar.arrived, bar.applied);
  const piece = (from, to, kind) => svg("rect", {
    x: Math.max(at(from), LABEL), y: top, height: 14, class: kind,
    width: Math.max(at(to) - Math.max(at(from), LABEL), kind === "on-line" ? 1 : 0),
  });
  const group = svg("g", {class: bar.left_out ? "bar left-out" : "bar"},
    piece(bar.launched, lineEnd, "on-line"), piece(lineEnd, bar.applied, "there"));
  if (bar.waited > 0.001) group.append(piece(waitedFrom, bar.applied, "waited"));
  group.append(svg("line", {x1: at(bar.applied), x2: at(bar.applied), y1: top - 2, y2: top + 16, class: "applied"}),
    svg("title", {}, tell(bar, name)));
  return group;
}

function tell(bar, name) {
  const told = [`${name}, round ${bar.round}: sent at step ${bar.launched_step}, applied at ${bar.applied_step}`];
  if (bar.transfer_seconds) told.push(`${duration(bar.transfer_seconds)} on its way`);
  if (bar.waited) told.push(`training waited ${duration(bar.waited)}`);
  if (bar.bytes_sent) told.push(bytes(bar.bytes_sent));
  if (bar.left_out) told.push(`left out: ${Object.entries(bar.left_out).map((e) => e.join(" ")).join(", ")}`);
  return told.join("; ");
}

function inWords({cluster, lanes}) {
  const last = lanes.map((lane) => lane.bars.at(-1)).filter(Boolean);
  const waited = last.filter((bar) => bar.waited > 0.001).length;
  return `Transfers of cluster ${cluster}: ${lanes.length} fragments, ${waited} of their last transfers were waited for`;
}

function stripes() {
  const pattern = svg("pattern", {id: "stripes", width: 5, height: 5, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)"}, svg("rect", {width: 5, height: 5, class: "stripe-ground"}),
    svg("line", {x1: 0, y1: 0, x2: 0, y2: 5, class: "stripe"}));
  return svg("defs", {}, pattern);
}

function key() {
  const sample = (kind) => svg("svg", {width: 26, height: 14, "aria-hidden": "true"},
    kind === "trained" ? svg("line", {x1: 0, x2: 26, y1: 7, y2: 7, class: kind})
      : svg("rect", {width: 26, height: 14, class: kind}));
  const item = (kind, text) => el("li", {}, sample(kind), text);
  return el("ul", {class: "legend"}, item("trained", "trained on"), item("on-line", "on the line"),
    item("there", "there, to be applied at the line's end"), item("waited", "training waits"));
}
