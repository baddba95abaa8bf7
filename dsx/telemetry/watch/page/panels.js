// Everything that is not a chart: tiles, clusters, parity, guard, checkpoints, events.

import {byId, bytes, clock, duration, el, mbits, number, setText, show} from "./dom.js";
import {explain} from "./explain.js";

const WORDS = {
  waiting: "No cluster has written a record yet: the run has not begun, or has not ended its first step. This page shows it as soon as it does.", training: "Training.",
  silent: "Nobody has said anything for some time.", finished: "Finished.",
  stopped: "Ended before it was finished.",
};
const MARKS = {trains: "\u25cf", ended: "\u2713", killed: "\u2715", "left out": "\u2212", heals: "\u21bb",
  silent: "\u2026", unseen: "?"};

export function showState(state) {
  document.title = `${state.run}: ${state.phase} - dsx watch`;
  setText(byId("name"), state.run);
  setText(byId("sentence"), sentence(state));
  showWhat(state.what);
  setText(byId("folder"), `${state.folder}${state.against ? `, against ${state.against}` : ""}`);
  const trouble = [state.trouble, ...(state.other_runs.length
    ? [`left out: cluster ${state.other_runs.join(", ")}, whose records are of another run`] : []),
  state.newer && `a later run of this name is in ${state.newer}: dsx watch ${state.newer} shows it`];
  setText(byId("trouble"), trouble.filter(Boolean).join("; "));
  byId("trouble").hidden = !trouble.some(Boolean);
  showTiles(state);
  showMembers(state);
  showParity(state.parity);
  showGuard(state.guard);
  showCheckpoints(state.checkpoints);
  showEvents(state.events);
}

// Which method runs, and what its words mean.
function showWhat(text) {
  const place = byId("what");
  setText(place, text ?? "");
  const made = text && !place.nextElementSibling && explain("what", "the method");
  if (made) place.after(" ", made);
}

function sentence(state) {
  const told = [WORDS[state.phase]];
  const going = state.members.filter((row) => row.state === "trains").length;
  if (state.phase === "training") told[0] = `${going} of ${state.num_clusters} clusters train.`;
  if (state.step !== undefined) {
    told.push(`Step ${number(state.step)}${state.planned_steps ? ` of ${number(state.planned_steps)}` : ""}.`);
  }
  for (const row of state.members) {
    if (!["trains", "ended", "unseen"].includes(row.state)) {
      told.push(`Cluster ${row.cluster} ${row.state === "heals" || row.state === "left out" ? "" : "is "}${
        row.state === "left out" ? "is left out" : row.state}.`);
    }
  }
  if (state.read_share < 0.999) told.push(`Records are being read: ${Math.round(100 * state.read_share)} %.`);
  return told.join(" ");
}

function showTiles(state) {
  const traffic = state.traffic ?? {};
  const tile = (key, name, value, more) => value === undefined ? null
    : {key, name, value, more: more ?? ""};
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const said = (value, how) => value === undefined || value === null ? undefined : how(value);
  const wrong = state.parity?.checked && ["differed_in", "refused_by", "uncommitted_by", "idle_in"]
    .reduce((sum, name) => sum + state.parity[name], 0);
  const rows = [
    tile("loss", "loss", said(state.loss, number), "mean of the clusters"),
    tile("validation", "validation loss", said(state.validation?.loss, number), state.validation?.of),
    tile("utilization", "utilization", said(state.utilization, percent), "of the last 50 steps"),
    tile("speed", "tokens/s", said(state.tokens_per_second, number), "all clusters"),
    tile("sent", "sent by a cluster", said(traffic.sent, bytes), traffic.data_parallel
      ? `data parallel: ${number(traffic.data_parallel / traffic.sent, 3)} times as much` : ""),
    tile("transfer", "transfers hidden", said(traffic.hidden, percent), "of the last 50, behind training"),
    tile("line", "line", said(traffic.line, (rate) => `${mbits(rate)} Mbit/s`), beside(traffic.measured, state.line_limit_mbit)),
    tile("round_trip", "round trip", said(longest(state.links, "round_trip_seconds"), duration),
      `${said(longest(state.links, "least_seconds"), duration)} at least`),
    tile("memory", "memory", said(longest(state.memory, "process_bytes"), bytes), planned(state.memory)),
    tile("parity", "same model", said(wrong || (wrong === 0 ? 0 : undefined), (n) => (n ? `${n} rounds not` : "yes")),
      state.parity?.checked ? `checked at step ${state.parity.checked.step}` : ""),
    tile("checkpoints", "checkpoint", said(state.checkpoints?.rows?.[0], (row) => `step ${row.step}`),
      state.checkpoints?.common_step !== undefined ? `all have ${state.checkpoints.common_step}` : ""),
    tile("eta", "time left", state.phase === "training" ? said(state.eta_seconds, duration) : undefined),
  ].filter(Boolean);
  const parent = byId("tiles");
  if (parent.dataset.shape !== rows.map((row) => row.key).join()) {
    parent.dataset.shape = rows.map((row) => row.key).join();
    parent.replaceChildren(...rows.map((row) => el("div", {class: "tile", "data-key": row.key},
      el("h2", {}, row.name, explain(row.key, row.name)), el("p", {class: "value"}), el("p", {class: "more"}))));
  }
  rows.forEach((row, at) => {
    setText(parent.children[at].querySelector(".value"), row.value);
    setText(parent.children[at].querySelector(".more"), row.more);
  });
}

// What the line's rate is to be seen beside.
function beside(measured, limit) {
  if (measured !== undefined) return `of ${mbits(measured)} measured, while a transfer is under way`;
  return limit === undefined ? "while a transfer is under way" : `of ${number(limit, 3)} allowed, while a transfer is under way`;
}

// The largest that any row has, if one has any.
function longest(rows, name) {
  const known = (rows ?? []).map((row) => row[name]).filter((value) => value !== undefined);
  return known.length ? Math.max(...known) : undefined;
}

function planned(rows) {
  const held = longest(rows, "outer_bytes");
  const plan = longest(rows, "outer_planned_bytes");
  return held === undefined || plan === undefined ? "" : `outer state ${bytes(held)}, planned ${bytes(plan)}`;
}

export function showMembers(state) {
  const panel = byId("members");
  panel.hidden = !state.members.length;
  head(panel);
  const names = ["cluster", "state", "last word", "step", "loss", "tokens/s", "utilization", "weight", "H", "sent", "rounds left out", "host"];
  const has = (name) => state.members.some((row) => row[name] !== undefined);
  const cells = (row) => [
    String(row.cluster), `${MARKS[row.state] ?? ""} ${row.state}`,
    row.last_word ? `${duration(Math.max(state.now - row.last_word, 0))} ago` : "-",
    number(row.step), number(row.loss), number(row.tokens_per_second),
    row.utilization === undefined ? "-" : `${(100 * row.utilization).toFixed(1)} %`,
    row.weight === undefined ? "-" : weight(row.weight),
    number(row.interval), row.sent === undefined ? "-" : bytes(row.sent), leftOut(row.left_out), row.host ?? "-",
  ];
  const fields = [null, null, "last_word", "step", "loss", "tokens_per_second", "utilization", "weight", "interval", "sent", "left_out", "host"];
  const kept = names.map((_, at) => fields[at] === null || has(fields[at]));
  const rows = state.members.map((row) => el("tr", {class: `is-${row.state.replace(" ", "-")}`, "data-cluster": row.cluster},
    cells(row).map((text, at) => (kept[at] ? el(at ? "td" : "th", {
      "data-name": names[at], ...(at ? {} : {scope: "row"}),
    }, text, at === 1 && row.why ? el("small", {}, row.why) : null,
      at === 1 && row.healing ? healing(row.healing) : null) : null))));
  show(panel.querySelector(".scrolls"), el("table", {},
    el("thead", {}, el("tr", {}, names.map((name, at) => (kept[at] ? el("th", {scope: "col"}, name) : null)))),
    el("tbody", {}, rows)));
}

// A share of the mean, as 1/n where it is one.
function weight(share) {
  const count = Math.round(1 / share);
  return share && Math.abs(share * count - 1) < 1e-6 ? (count === 1 ? "1" : `1/${count}`) : number(share, 3);
}

function healing(how) {
  if (how.copied !== undefined) {
    return el("small", {class: "healing"}, el("progress", {max: 1, value: how.copied, "aria-label": "copied"}),
      ` ${Math.round(100 * how.copied)} % copied`);
  }
  const told = [`step ${number(how.step)}, the others are at ${number(how.target)}`];
  if (how.steps_per_second) told.push(`${number(how.steps_per_second, 2)} steps/s`);
  if (how.seconds_left !== undefined) told.push(`${duration(how.seconds_left)} left`);
  const text = told.join(", ");
  return el("small", {class: "healing"}, el("progress", {max: Math.max(how.target, 1), value: how.step,
    "aria-label": text}), ` ${text}`);
}

const REASONS = {refused_by: "refused", differed_in: "differed", uncommitted_by: "uncommitted", idle_in: "idle"};

function leftOut(counts) {
  return Object.entries(counts ?? {}).map(([name, count]) => `${count} ${REASONS[name]}`).join(", ") || "-";
}

function showParity(parity) {
  const panel = byId("parity");
  panel.hidden = !parity?.checked;
  if (panel.hidden) return;
  head(panel);
  const count = (name, word) => el("li", {}, `${parity[name]} rounds ${word}`);
  const last = parity.last;
  show(panel.querySelector(".body"),
    el("p", {}, `Last checked: round ${parity.checked.round}, at step ${parity.checked.step}.`),
    el("ul", {}, count("differed_in", "in which clusters held other bits"),
      count("refused_by", "refused: values not finite, or far too large"),
      count("uncommitted_by", "not committed: another mean"), count("idle_in", "in which a cluster took no step")),
    last ? el("p", {}, `The last one: step ${last.step}, fragment ${last.fragment}, ${Object.entries(last)
      .filter(([name]) => !["step", "fragment"].includes(name)).map((e) => `${e[0]} ${e[1]}`).join(", ")}.`) : null);
}

function showGuard(guard) {
  const panel = byId("guard");
  panel.hidden = !Object.keys(guard ?? {}).length;
  if (panel.hidden) return;
  head(panel);
  const alarms = Object.entries(guard.alarms ?? {}).map(([kind, n]) => `${kind} (${n})`);
  const figures = ["autocorrelation", "cluster_cosine", "norm_ratio", "effective_gain"]
    .filter((name) => guard[name] !== undefined).map((name) => `${name.replace("_", " ")} ${number(guard[name], 3)}`);
  show(panel.querySelector(".body"), el("p", {}, alarms.length ? `Alarms: ${alarms.join(", ")}.` : "No alarms."),
    guard.rungs?.length ? el("p", {}, `Steps down taken: ${guard.rungs.join(", ")}.`) : null,
    figures.length ? el("p", {}, `Last figures: ${figures.join(", ")}.`) : null);
}

function showCheckpoints(checkpoints) {
  const panel = byId("checkpoints");
  panel.hidden = !checkpoints?.count;
  if (panel.hidden) return;
  head(panel);
  const common = checkpoints.common_step;
  show(panel.querySelector(".body"),
    el("p", {}, common === undefined ? "No checkpoint is of all clusters." : `All clusters have step ${common}.`),
    el("ul", {}, checkpoints.rows.map((row) => el("li", {},
      `${row.tag}, ${clock(row.time)}: cluster ${row.clusters.join(", ")}${row.is_there ? "" : " (not in this folder)"}` +
      (row.copied ? `; copied by cluster ${row.copied.join(", ")}, to ${row.copied_to}` : "")))));
}

function showEvents(events) {
  const panel = byId("events");
  panel.hidden = !events.length;
  if (panel.hidden) return;
  head(panel);
  show(panel.querySelector(".body"), events.map((event) => el("li", {class: event.level},
    el("time", {}, clock(event.time)), event.level === "info" ? "" : `${event.level}: `,
    `cluster ${event.cluster}: `, event.text)));
}

export function head(panel) {
  const title = panel.querySelector("h2");
  if (!title.querySelector(".explained")) {
    const made = explain(panel.dataset.key, title.textContent);
    if (made) title.append(made);
  }
}
