// The numbers, by slider or typed, and the schedules to choose from.

import { make } from "./dom.js";
import { change, state } from "./state.js";

const SLIDERS = [
  { name: "ranks", label: "Ranks", from: 1, to: 16, step: 1, most: 64 },
  { name: "microbatches", label: "Microbatches", from: 1, to: 64, step: 1, most: 512 },
  { name: "chunks", label: "Chunks a rank", from: 0, to: 8, step: 1, most: 8, empty: "usual" },
  { name: "forward", label: "F, forward", from: 0, to: 4, step: 0.05, cost: true, unit: "units of time" },
  { name: "backward_input", label: "I, input gradient", from: 0, to: 4, step: 0.05, cost: true, unit: "units of time" },
  { name: "backward_weight", label: "W, weight gradient", from: 0, to: 4, step: 0.05, cost: true, unit: "units of time" },
  { name: "comm", label: "Latency of a message", from: 0, to: 2, step: 0.05, cost: true, unit: "units of time" },
  {
    name: "head", label: "Last stage heavier, %", from: 0, to: 3, step: 0.05, cost: true, times: 100, unit: "percent",
  },
  {
    name: "memory_limit", label: "Memory limit (microbatches)", from: 0, to: 32, step: 0.5, cost: true, empty: "none", unit: "microbatches",
  },
];

/** Fills the panel. `changed` is called after each change. */
export function controls(panel, catalog, changed) {
  const sliders = SLIDERS.map((each) => slider(each, changed));
  panel.append(
    make("details", { open: true }, make("summary", {}, "Numbers"), make("div", { className: "numbers" }, ...sliders.map((one) => one.row))),
    chosen(catalog, changed),
  );
  return { refresh: () => sliders.forEach((one) => one.refresh()) };
}

function slider(given, changed) {
  const times = given.times ?? 1;
  const input = make("input", { type: "range", id: `in-${given.name}`, min: given.from, max: given.to, step: given.step, name: given.name });
  const typed = make("input", {
    type: "number", className: "typed", min: times * given.from, max: given.most ?? "", step: "any", placeholder: given.empty ?? "",
    aria: { label: `${given.label}, typed` },
  });
  const take = (value) => {
    change({ [given.name]: given.empty && !value ? "" : value });
    show(value);
    changed();
  };
  input.addEventListener("input", () => take(Number(input.value)));
  typed.addEventListener("change", () => {
    const value = Math.max(given.from, Math.min(Number(typed.value) / times, given.most ?? Infinity));
    take(given.step === 1 ? Math.round(value) : value);
    refresh();
  });
  const refresh = () => {
    const value = Number(state[given.name] || 0);
    input.max = Math.max(given.to, Math.min(value, given.most ?? value));
    input.value = value;
    show(value);
  };
  const show = (value) => {
    typed.value = given.empty && !value ? "" : String(Number((times * value).toPrecision(6)));
    input.setAttribute("aria-valuetext", typed.value ? `${typed.value} ${given.unit ?? ""}`.trim() : given.empty);
  };
  refresh();
  const label = make("label", { htmlFor: input.id }, given.label);
  return { row: make("div", { className: `slider${given.cost ? " cost" : ""}` }, label, input, typed), refresh };
}

function chosen(catalog, changed) {
  const boxes = catalog.schedules.map((one) => {
    const box = make("input", { type: "checkbox", value: one.name, checked: state.schedules.split(",").includes(one.name) });
    box.addEventListener("change", () => {
      change({ schedules: boxes.filter((each) => each.checked).map((each) => each.value).join(",") });
      changed();
    });
    return box;
  });
  const labels = boxes.map((box, place) => make("label", { title: catalog.schedules[place].rule }, box, ` ${box.value}`));
  return make("details", { open: true, className: "choose cost" }, make("summary", {}, "Schedules"), make("div", { className: "chips" }, ...labels));
}
