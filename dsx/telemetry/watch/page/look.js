// Colours that are told apart by most eyes (Okabe and Ito), and dashes and words beside them.

const LIGHT = ["#0072b2", "#d55e00", "#008060", "#b5509a", "#8a6d00", "#3a8fc4", "#5b3fa0", "#555555"];
const DARK = ["#56b4e9", "#ff9a4d", "#2fc79b", "#e79bd0", "#e6c84a", "#9fd0f2", "#b9a3f5", "#cccccc"];
const DASHES = [[], [8, 3], [2, 3], [8, 3, 2, 3], [14, 4], [4, 4], [1, 4], [14, 4, 2, 4]];

export const isDark = () => window.matchMedia("(prefers-color-scheme: dark)").matches;

// `index` is a line's place, and `names` are those of its chart's lines: a cluster has one colour.
export function styleOf(line, index, names) {
  if (line.name === "average") return {stroke: isDark() ? "#ffffff" : "#000000", width: 2.5, dash: []};
  if (line.name === "reference" || ["limit", "measured"].includes(line.name)) return {stroke: isDark() ? "#aaaaaa" : "#777777", width: 1.5, dash: [3, 3]};
  const number = line.cluster ?? index;
  const colours = isDark() ? DARK : LIGHT;
  const dash = line.cluster === undefined ? index : number * names.length + names.indexOf(line.name);
  return {stroke: colours[number % colours.length], width: 1.5, dash: DASHES[dash % DASHES.length]};
}

export const ink = () => (isDark() ? "#c8ccd4" : "#40454f");
export const gridInk = () => (isDark() ? "#343a46" : "#e3e6eb");
export const onChange = (then) =>
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", then);
