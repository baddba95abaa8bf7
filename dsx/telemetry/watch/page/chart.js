// One chart: fetched for the span that is looked at, drawn by uPlot, with a legend of its own.

import {clock, el, inSteps, inUnit, number, setText} from "./dom.js";
import {explain} from "./explain.js";
import {gridInk, ink, onChange, styleOf} from "./look.js";

const NAMES = {step: "inner step", tokens: "tokens of a cluster", time: "time"};
const PHONE = 600;
const MARGIN = 0.5; // of a span that was chosen: moving within it needs nothing fetched

export class Chart {
  // `view` is shared by all charts: {axis, last, span}; `look(span)` changes it.
  constructor(about, parent, view, look) {
    Object.assign(this, {about, view, look, plot: null, data: null, shape: "", isSeen: false});
    this.picture = el("div", {class: "picture", tabindex: "0", role: "img"});
    this.legend = el("ul", {class: "legend"});
    this.section = el("section", {class: "panel chart", "data-key": about.key, id: `chart-${about.key}`},
      el("h2", {}, about.title, explain(about.key, about.title)), this.legend, this.picture);
    parent.append(this.section);
    this.picture.addEventListener("keydown", (event) => this.press(event));
    this.picture.addEventListener("dblclick", () => this.look(null));
    this.picture.addEventListener("pointerdown", (event) => this.grab(event), true);
    new ResizeObserver(() => this.fit()).observe(this.picture);
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen && this.isOld) this.refresh();
    }, {rootMargin: "200px"}).observe(this.section);
    onChange(() => { this.shape = ""; this.draw(); });
    this.isOld = true;
  }

  async refresh() {
    this.isOld = true;
    if (!this.isSeen || this.isFetching) return;
    this.isFetching = true;
    const {axis, last, span} = this.view;
    const asked = new URLSearchParams({key: this.about.key, axis, points: this.points()});
    if (span) {
      const more = MARGIN * (span[1] - span[0]);
      asked.set("from", span[0] - more);
      asked.set("to", span[1] + more);
      asked.set("points", 2 * this.points());
    } else if (last) asked.set("last", last);
    try {
      const answer = await fetch(`/api/chart?${asked}`);
      if (answer.ok) {
        this.data = await answer.json();
        this.isOld = axis !== this.view.axis || span !== this.view.span;
        this.draw();
      }
    } catch { /* the server has ended: main.js says so */ }
    this.isFetching = false;
    if (this.isOld && this.data && axis + span !== this.view.axis + this.view.span) this.refresh();
  }

  points() {
    return Math.max(100, Math.min(800, Math.round(this.picture.clientWidth || 600)));
  }

  draw() {
    if (!this.data) return;
    const {lines, axis} = this.data;
    const shape = JSON.stringify([axis, lines.map((line) => [line.name, line.cluster, "low" in line])]);
    const values = columns(this.data);
    if (shape !== this.shape || !this.plot) this.build(shape, values);
    else this.plot.setData(values, false);
    const [low, high] = this.view.span ?? this.data.span;
    this.plot.setScale("x", {min: low, max: high > low ? high : low + 1});
    this.showLegend(null);
    this.picture.setAttribute("aria-label", this.inWords());
  }

  build(shape, values) {
    this.plot?.destroy();
    this.shape = shape;
    const {lines, axis} = this.data;
    const {unit} = this.about;
    const series = [{}];
    const bands = [];
    lines.forEach((line, index) => {
      const style = styleOf(line, index, namesIn(lines));
      series.push({
        label: nameOf(line), spanGaps: false, ...style,
        points: {show: (plot, at) => line.dots || isShort(plot.data[at]), size: 7, fill: style.stroke},
        ...(line.dots ? {paths: () => null} : {}),
      });
      if ("low" in line) {
        const edge = {stroke: "transparent", points: {show: false}, spanGaps: false};
        series.push({...edge}, {...edge});
        bands.push({series: [series.length - 1, series.length - 2], fill: `${style.stroke}26`});
      }
    });
    const axisLook = {stroke: ink, grid: {stroke: gridInk, width: 1}, ticks: {stroke: gridInk, width: 1}};
    this.plot = new uPlot({
      ...this.size(), series, bands, legend: {show: false},
      scales: {x: {time: axis === "time", auto: false}, y: {range: roomy}},
      axes: [
        {...axisLook, ...(axis === "time" ? {} : {values: (_, ticks) => ticks.map((v) => number(v))})},
        {...axisLook, size: 68, values: (_, ticks) => inSteps(ticks, unit)},
      ],
      cursor: {drag: {x: true, y: false, setScale: false}, sync: {key: "dsx"}, points: {size: 6}},
      hooks: {
        setCursor: [(plot) => this.showLegend(plot.cursor.idx)],
        setSelect: [(plot) => this.choose(plot)],
      },
    }, values, this.picture);
  }

  choose(plot) {
    if (plot.select.width < 4) return;
    const span = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    this.look(span);
  }

  showLegend(index) {
    const {lines, x, axis} = this.data;
    const rows = lines.map((line, place) => {
      const at = index ?? lastKnown(line.y);
      const value = line.y[at];
      const text = value === null || value === undefined ? "-" : inUnit(value, this.about.unit);
      return {name: nameOf(line), text, style: styleOf(line, place, namesIn(lines)), dots: line.dots};
    });
    const place = index === null || index === undefined ? null : placeOf(x[index], axis);
    if (this.legend.children.length !== rows.length + 1 || this.shownShape !== this.shape) {
      this.shownShape = this.shape;
      this.legend.replaceChildren(...rows.map((row) => el("li", {}, sample(row),
        el("span", {}, row.name), el("b"))), el("li", {class: "place"}));
    }
    rows.forEach((row, at) => setText(this.legend.children[at].lastChild, row.text));
    setText(this.legend.lastChild, place ?? `last values, by ${NAMES[axis]}`);
  }

  inWords() {
    const told = this.data.lines.map((line) =>
      `${nameOf(line)} ${inUnit(line.y[lastKnown(line.y)], this.about.unit)}`);
    return `${this.about.title} against ${NAMES[this.data.axis]}: ${told.join(", ")}`;
  }

  press(event) {
    if (!this.data) return;
    const [low, high] = this.view.span ?? this.data.span;
    const width = high - low;
    const to = {
      "ArrowLeft": () => [low - width / 4, high - width / 4],
      "ArrowRight": () => [low + width / 4, high + width / 4],
      "+": () => [low + width / 4, high - width / 4],
      "-": () => [low - width / 2, high + width / 2],
      "0": () => null,
    }[event.key];
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.look(this.within(to()));
  }

  within(span) {
    if (!span) return null;
    const [first, last] = this.data.whole;
    const width = Math.min(span[1] - span[0], last - first);
    if (width >= last - first) return null;
    const low = Math.min(Math.max(span[0], first), last - width);
    return [low, low + width];
  }

  // With Shift, or the middle button, a drag moves the chart.
  grab(event) {
    if (!this.plot || !(event.shiftKey || event.button === 1)) return;
    event.preventDefault();
    event.stopPropagation();
    const {min, max} = this.plot.scales.x;
    const perPixel = (max - min) / this.plot.over.clientWidth;
    const move = (now) => {
      const by = (event.clientX - now.clientX) * perPixel;
      this.moved = this.within([min + by, max + by]);
      if (this.moved) this.plot.setScale("x", {min: this.moved[0], max: this.moved[1]});
    };
    const end = () => {
      window.removeEventListener("pointermove", move);
      if (this.moved) this.look(this.moved);
      this.moved = null;
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end, {once: true});
  }

  size() {
    const width = Math.max(this.picture.clientWidth, 200);
    return {width, height: window.innerWidth < PHONE ? 190 : 240};
  }

  fit() {
    const size = this.size();
    if (this.plot && this.plot.width !== size.width) this.plot.setSize(size);
  }
}

// A bucket without a record is passed over (undefined), one whose value is no number is a gap.
function columns({x, lines}) {
  const found = [x];
  for (const line of lines) {
    const gaps = new Set(line.gaps ?? []);
    const open = (values) => values.map((v, at) => (v === null && !gaps.has(at) ? undefined : v));
    found.push(open(line.y));
    if ("low" in line) found.push(open(line.low), open(line.high));
  }
  return found;
}

// Of one value or two there is hardly a line to be seen.
function isShort(values) {
  return values.filter((value) => value !== undefined && value !== null).length < 3;
}

function roomy(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function nameOf(line) {
  const cluster = line.cluster === undefined ? "" : `cluster ${line.cluster}`;
  return [cluster, line.name].filter(Boolean).join(", ");
}

function namesIn(lines) {
  const own = lines.filter((line) => line.cluster !== undefined && !line.dots);
  return [...new Set(own.map((line) => line.name))];
}

function placeOf(x, axis) {
  return axis === "time" ? clock(x) : `${NAMES[axis]} ${number(x, 6)}`;
}

function lastKnown(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return at;
  return values.length - 1;
}

const SVG = "http://www.w3.org/2000/svg";

function sample({style, dots}) {
  const svg = document.createElementNS(SVG, "svg");
  const mark = document.createElementNS(SVG, dots ? "circle" : "line");
  const shape = dots ? {cx: 14, cy: 6, r: 4, fill: style.stroke}
    : {x1: 0, y1: 6, x2: 28, y2: 6, stroke: style.stroke, "stroke-width": style.width + 0.5,
      "stroke-dasharray": style.dash.join(" ")};
  for (const [key, value] of Object.entries(shape)) mark.setAttribute(key, value);
  for (const [key, value] of Object.entries({width: 28, height: 12, "aria-hidden": "true"})) svg.setAttribute(key, value);
  svg.append(mark);
  return svg;
}
