// Takes the state as it comes, and has charts fetched as they need it.

import {Chart} from "./chart.js";
import {byId, clock, el, setText} from "./dom.js";
import {loadMeanings} from "./explain.js";
import {drawLanes} from "./lanes.js";
import {showLinks, showMemory} from "./machine.js";
import {head, showMembers, showState} from "./panels.js";

const MAIN = new Set(["loss", "utilization"]);
const AXES = {step: "inner steps", tokens: "tokens", time: "time"};
const FAST = 1000; // milliseconds between two looks of a chart whose points still come singly
const SLOW = 4000;
const MOVE = 500;
const MOST_AHEAD = 600; // seconds without a record, after which nothing is drawn as under way

const view = {axis: "step", last: "", span: null};
const charts = new Map();
let state = null;
let fetched = 0;
let drawnVersion = -1;
let isWaiting = false;
let ahead = 0; // seconds of this clock before the server's
let lanes = null;

function look(span) {
  view.span = span;
  byId("whole").hidden = !span;
  refreshAll();
}

function refreshAll() {
  fetched = Date.now();
  for (const chart of charts.values()) chart.refresh();
  refreshLanes();
}

async function refreshLanes() {
  const panel = byId("lanes");
  const answer = await fetch("/api/lanes").catch(() => null);
  if (!answer?.ok) return;
  lanes = await answer.json();
  panel.hidden = !lanes.lanes.length;
  if (panel.hidden) return;
  head(panel);
  moveLanes();
}

// Time goes on between records: what is under way grows with it, and the view moves.
function moveLanes() {
  const row = state?.members.find((one) => one.cluster === lanes.cluster);
  const now = Date.now() / 1000 - ahead;
  const goesOn = ["trains", "silent"].includes(row?.state) && now - lanes.span[1] < MOST_AHEAD;
  drawLanes(byId("lanes").querySelector(".picture"), lanes,
    goesOn ? Math.max(now, lanes.span[1]) : null, pause() / 1000);
}

const pause = () => ((state.step ?? 0) > 2000 ? SLOW : FAST);

function refreshSoon() {
  if (isWaiting || document.hidden || state.version === drawnVersion) return;
  isWaiting = true;
  setTimeout(() => {
    isWaiting = false;
    drawnVersion = state.version;
    refreshAll();
  }, Math.max(0, fetched + pause() - Date.now()));
}

function showCharts() {
  for (const about of state.charts) {
    if (!charts.has(about.key)) {
      const parent = byId(MAIN.has(about.key) ? "main-charts" : "more-charts");
      charts.set(about.key, new Chart(about, parent, view, look));
    }
  }
  for (const [key, chart] of charts) chart.section.hidden = !state.charts.some((one) => one.key === key);
  byId("choice").hidden = !state.charts.length;
  const axis = byId("axis");
  if (axis.children.length !== state.axes.length) {
    axis.replaceChildren(...state.axes.map((name) => el("option", {value: name}, AXES[name])));
    axis.value = view.axis;
  }
}

function take(event) {
  state = JSON.parse(event.data);
  ahead = Date.now() / 1000 - state.now;
  contact("live", `live, ${clock(state.now)}`);
  showState(state);
  showLinks(state.links ?? [], state.num_links);
  showMemory(state.memory ?? []);
  showCharts();
  refreshSoon();
}

function contact(kind, text) {
  byId("contact").className = kind;
  setText(byId("contact"), text);
}

byId("axis").addEventListener("change", (event) => {
  view.axis = event.target.value;
  look(null);
});
byId("range").addEventListener("change", (event) => {
  view.last = event.target.value;
  look(null);
});
byId("whole").addEventListener("click", () => look(null));
setInterval(() => state && byId("contact").className === "live" && !document.hidden
  && showMembers({...state, now: Date.now() / 1000 - ahead}), 1000);
setInterval(() => lanes?.lanes.length && byId("contact").className === "live" && !document.hidden
  && !byId("lanes").matches(":hover") && moveLanes(), MOVE);
document.addEventListener("visibilitychange", () => state && refreshSoon());

await loadMeanings();
const source = new EventSource("/events");
source.addEventListener("state", take);
source.addEventListener("error", () =>
  contact("lost", "dsx watch does not answer: it has ended, or the way to it is cut. What is shown is what was last known."));
