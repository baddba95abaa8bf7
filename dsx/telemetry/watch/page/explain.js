// What a figure means: a button in its heading that opens on hover, focus, and tap.

import {el} from "./dom.js";

let meanings = {};
let open = null;
let count = 0;

export async function loadMeanings() {
  meanings = await (await fetch("/api/meanings")).json();
  document.addEventListener("keydown", (event) => event.key === "Escape" && close());
  document.addEventListener("pointerdown", (event) => {
    if (open && !open.box.contains(event.target) && event.target !== open.button) close();
  });
}

export function explain(key, title) {
  const meaning = meanings[key];
  if (!meaning) return null;
  const id = `meaning-${(count += 1)}`;
  const line = (word, text) => el("p", {}, el("b", {}, `${word} `), text);
  const box = el("div", {class: "meaning", id, role: "note", hidden: true},
    line("It means:", meaning.means), line("A bad value:", meaning.bad),
    line("What to do:", meaning.do), el("p", {class: "docs"}, meaning.docs));
  const button = el("button", {
    class: "why", type: "button", "aria-expanded": "false", "aria-controls": id,
    "aria-label": `what ${title} means`,
  }, "?");
  const entry = {box, button, isHeld: false};
  button.addEventListener("click", () => {
    if (open === entry && entry.isHeld) close();
    else { show(entry); entry.isHeld = true; }
  });
  button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(entry));
  button.addEventListener("focus", () => button.matches(":focus-visible") && show(entry));
  button.addEventListener("blur", () => open === entry && close());
  button.addEventListener("pointerleave", () => open === entry && !entry.isHeld && close());
  return el("span", {class: "explained"}, button, box);
}

function show(entry) {
  if (open && open !== entry) close();
  open = entry;
  entry.box.hidden = false;
  entry.button.setAttribute("aria-expanded", "true");
  const side = entry.button.getBoundingClientRect();
  entry.box.classList.toggle("from-right", side.left > window.innerWidth / 2);
}

function close() {
  if (!open) return;
  open.box.hidden = true;
  open.isHeld = false;
  open.button.setAttribute("aria-expanded", "false");
  open = null;
}
