// The way of each fragment: a row each, bars in time. On the line: striped; there: plain; waited
// for: dark, with an edge. So it is read without colours. What is under way reaches up to now.

import {bytes, clock, duration, el} from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 20;
const LABEL = 92;
const USUAL = 3; // times a step's seconds: a step that has not ended by then stands still

function svg(name, fields, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(fields)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// `now` is null where nothing goes on: then the picture ends with the last record. `data` may be
// `late` by so many seconds.
export function drawLanes(parent, data, now, late) {
  const width = Math.max(parent.clientWidth, 240);
  const {lanes, span} = data;
  const end = now ?? span[1];
  const begin = span[0] + end - span[1];
  const limit = Math.max(USUAL * data.step_seconds, 1) + 1.5 * late;
  const trainsUntil = end - data.stepped > limit ? data.stepped : end;
  const height = ROW * lanes.length + 22;
  const at = (when) => LABEL + ((when - begin) / Math.max(end - begin, 1e-9)) * (width - LABEL - 4);
  const stages = new Set(lanes.map((lane) => lane.stage)).size > 1;
  const picture = svg("svg", {width, height, role: "img", "aria-label": inWords(data)}, stripes());
  lanes.forEach((lane, row) => {
    const top = ROW * row + 3;
    const name = stages ? `stage ${lane.stage}, ${lane.fragment}` : `fragment ${lane.fragment}`;
    picture.append(svg("text", {x: 0, y: top + 12, class: "label"}, name),
      svg("line", {x1: LABEL, x2: Math.max(at(trainsUntil), LABEL), y1: top + 7, y2: top + 7, class: "trained"}));
    for (const bar of lane.bars) {
      if ((bar.applied ?? end) > begin) picture.append(drawBar(bar, at, top, name, end, limit));
    }
  });
  for (const part of [0, 0.5, 1]) {
    const when = begin + part * (end - begin);
    const anchor = ["start", "middle", "end"][2 * part];
    picture.append(svg("text", {x: at(when), y: height - 5, class: "label", "text-anchor": anchor}, clock(when)));
  }
  parent.replaceChildren(picture, key());
}

function drawBar(bar, at, top, name, end, limit) {
  const applied = bar.applied ?? end;
  const lineEnd = Math.min(bar.arrived ?? end, applied);
  const standsStill = bar.is_ahead && end - bar.launched > limit;
  const waited = standsStill ? end - bar.launched : bar.waited;
  const piece = (from, to, kind) => svg("rect", {
    x: Math.max(at(from), LABEL), y: top, height: 14, class: kind,
    width: Math.max(at(to) - Math.max(at(from), LABEL), kind === "on-line" ? 1 : 0),
  });
  const group = svg("g", {class: `bar${bar.left_out ? " left-out" : ""}${bar.applied ? "" : " under-way"}`},
    piece(bar.launched, lineEnd, "on-line"), piece(lineEnd, applied, "there"));
  if (waited > 0.001) group.append(piece(applied - waited, applied, "waited"));
  if (bar.applied) group.append(svg("line", {x1: at(applied), x2: at(applied), y1: top - 2, y2: top + 16, class: "applied"}));
  group.append(svg("title", {}, tell(bar, name, end, standsStill)));
  return group;
}

function tell(bar, name, end, standsStill) {
  if (!bar.applied) {
    const where = bar.arrived ? "there, and not applied yet" : `on the line for ${duration(Math.max(end - bar.launched, 0))}`;
    return `${name}: sent at step ${bar.launched_step}, ${where}${standsStill ? "; training stands still for it" : ""}`;
  }
  const round = bar.round === undefined ? "" : `, round ${bar.round}`;
  const told = [`${name}${round}: sent at step ${bar.launched_step}${
    bar.applied_step === undefined ? ", applied" : `, applied at ${bar.applied_step}`}`];
  if (bar.transfer_seconds) told.push(`${duration(bar.transfer_seconds)} on its way`);
  if (bar.waited) told.push(`training waited ${duration(bar.waited)}`);
  if (bar.bytes_sent) told.push(bytes(bar.bytes_sent));
  if (bar.left_out) told.push(`left out: ${Object.entries(bar.left_out).map((e) => e.join(" ")).join(", ")}`);
  return told.join("; ");
}

function inWords({cluster, lanes}) {
  const last = lanes.map((lane) => lane.bars.at(-1)).filter(Boolean);
  const waited = last.filter((bar) => bar.waited > 0.001).length;
  const open = lanes.flatMap((lane) => lane.bars).filter((bar) => !bar.applied).length;
  return `Transfers of cluster ${cluster}: ${lanes.length} fragments, ${open} transfers under way, ${
    waited} of the last ones were waited for`;
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
    item("there", "there, applied at the upright line"), item("waited", "training waits"));
}
