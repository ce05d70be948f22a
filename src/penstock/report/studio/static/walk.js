// Slot by slot: what each rank does, in words, of two schedules beside each other.

import { ask, make, newestOnly, tell } from "./dom.js";
import { change, question, state } from "./state.js";

const CELL = 29; // pixels of a slot, and of the names left of them
const NAMES = 62;

export function walk(panel, catalog) {
  const sides = ["left", "right"].map((side) => sideOf(side, catalog, () => update()));
  const slider = make("input", { type: "range", min: 0, max: 0, value: 0, id: "slot", aria: { label: "Slot" } });
  const button = (text, by, hint) => make("button", { title: hint, on: { click: () => go(Number(state.slot) + by) } }, text);
  const where = make("output", { id: "slot-number", htmlFor: "slot" });
  panel.append(
    make("p", {}, "A slot is the time of one action; what it makes can be used from the next slot on. ",
      make("span", { className: "muted" }, "← and → step, Home and End jump.")),
    make("div", { className: "steps" }, button("◀ Back", -1, "Left arrow"), slider, button("Next step ▶", 1, "Right arrow"), where),
    make("div", { className: "sides" }, ...sides.map((side) => side.element)),
  );
  let walks = [];

  slider.addEventListener("input", () => go(Number(slider.value)));
  document.addEventListener("keydown", (event) => {
    if (panel.hidden || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.target.matches("input[type=range], select") && event.target !== slider) return;
    const to = { ArrowLeft: Number(state.slot) - 1, ArrowRight: Number(state.slot) + 1, Home: 0, End: last() }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to);
  });

  const last = () => Math.max(0, ...walks.map((one) => one.slots - 1));

  function go(slot) {
    change({ slot: Math.min(last(), Math.max(0, Math.trunc(slot) || 0)) });
    draw();
  }

  function draw() {
    const slot = Number(state.slot);
    slider.max = last();
    slider.value = slot;
    where.textContent = `slot ${slot} of 0 to ${last()}`;
    sides.forEach((side, place) => side.draw(walks[place], slot));
  }

  const update = newestOnly(async () => {
    try {
      const given = (name) => question(name);
      walks = (await Promise.all([state.left, state.right].map((name) => ask("api/walk", given(name))))).map((one) => one.walks[0]);
      tell(null);
      go(Number(state.slot) || 0);
    } catch (error) {
      tell(error.message);
    }
  });

  return { update };
}

function sideOf(side, catalog, changed) {
  const choice = make("select", { aria: { label: "Schedule" }, data: { side } },
    ...catalog.schedules.map((one) => make("option", { value: one.name }, one.name)));
  choice.value = state[side];
  choice.addEventListener("change", () => {
    change({ [side]: choice.value });
    changed();
  });
  const rule = make("p", { className: "notes" });
  const headline = make("h2", { aria: { live: "polite" } });
  const table = make("table", { className: "slots" });
  const words = make("ol", { className: "words" });
  return {
    element: make("article", { data: { side } }, choice, rule, make("div", { className: "wide", tabIndex: 0 }, table), headline, words),
    draw(walk, slot) {
      if (!walk) return;
      choice.value = walk.name;
      rule.textContent = walk.rule;
      const over = slot >= walk.slots;
      headline.textContent = over ? `${walk.name} has finished: it took ${walk.slots} slots` : walk.headlines[slot];
      words.replaceChildren(...(over ? [] : walk.ranks.map((cells, rank) => sentence(cells[slot], rank))));
      grid(table, walk, slot);
    },
  };
}

function sentence(cell, rank) {
  return make("li", { data: { rank, busy: cell.op ?? "" } }, swatch(cell), make("span", {}, `${cell.text}.`));
}

function swatch(cell) {
  return make("i", { className: cell.op ? `op op-${cell.op}` : "op", aria: { hidden: "true" } }, cell.label ?? "");
}

/** The slots around the current one. What an action or a waiting rank needs is marked. */
function grid(table, walk, slot) {
  const room = Math.max(5, Math.floor((table.parentElement.clientWidth - NAMES) / Math.max(CELL, 8 + 7 * walk.longest)));
  const from = Math.max(0, Math.min(slot - (room >> 1), walk.slots - room));
  const to = Math.min(walk.slots, from + room);
  const needed = new Set(slot < walk.slots ? walk.ranks.flatMap((cells) => cells[slot].needs.map(([rank, at]) => `${rank} ${at}`)) : []);
  const numbers = Array.from({ length: to - from }, (_, place) => from + place);
  table.replaceChildren(
    make("thead", {}, make("tr", {}, make("th", {}, "slot"), ...numbers.map((at) => make("th", { className: at === slot ? "now" : "" }, String(at))))),
    make("tbody", {}, ...walk.ranks.map((cells, rank) =>
      make("tr", {}, make("th", { scope: "row" }, `rank ${rank}`), ...numbers.map((at) => {
        const cell = cells[at];
        const marks = [at === slot ? "now" : "", needed.has(`${rank} ${at}`) ? "needed" : "", cell.op ? `op-${cell.op}` : "idle"];
        return make("td", { className: marks.join(" "), title: cell.text }, cell.label ?? "·");
      })))),
  );
}
