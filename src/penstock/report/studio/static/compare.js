// Two or more runs over each other: their figures, their loss and step time as lines, a step of each as timelines on one axis.

import { chart } from "./chart.js";
import { ask, bytes, digits, make, percent, seconds } from "./dom.js";
import { Timeline } from "../web/timeline.js";

export const MOST = 6; // runs; the server reads one at a time

/** Fills an element. `runs` are entries of the catalog; the first is what the others are held against. Returns its timeline, or null. */
export async function compare(element, runs) {
  const found = await Promise.all(runs.map(async (one) => {
    const [now, step] = await Promise.all([ask("api/live", { name: one.name }), ask("api/open", { name: one.name })]);
    return { ...one, now, step };
  }));
  const picture = make("div", { className: "picture" });
  const lines = (value) => found.map((one) => ({ name: one.name, points: one.now.steps.map((step) => [step.step, value(step)]) }));
  element.replaceChildren(
    make("h2", {}, "Compared"),
    make("div", { className: "wide", tabIndex: 0 }, figures(found)),
    make("div", { className: "charts" },
      chart("Loss", [], digits, lines((step) => (step.loss === null ? NaN : Number(step.loss)))),
      chart("In Pipeline.step", [], seconds, lines((step) => step.seconds))),
    make("h2", {}, "A step of each"),
    picture,
  );
  const bands = found.filter((one) => one.step.timeline).map((one) => ({ ...one.step.timeline.bands[0], name: one.name }));
  return bands.length ? new Timeline(picture, { ...found.find((one) => one.step.timeline).step.timeline, bands }, { wheel: "focused" }) : null;
}

/** A column for each run: the settings in which they differ, then speed, loss and memory, then where the step's time went. */
function figures(found) {
  const settings = found.map((one) => one.summary?.settings ?? {});
  const names = [...new Set(settings.flatMap(Object.keys))].filter((name) => settings.some((one) => JSON.stringify(one[name]) !== JSON.stringify(settings[0][name])));
  const progress = (key) => (one) => one.summary?.progress?.[key];
  const reasons = [...new Set(found.flatMap((one) => Object.keys(one.step.explanation?.by_rank[0]?.idle_seconds ?? {})))];
  const mean = (of) => (one) => one.step.explanation && one.step.explanation.by_rank.reduce((sum, rank) => sum + (of(rank) ?? 0), 0) / one.step.explanation.by_rank.length;
  const rows = [
    ...names.map((name) => [name, (one) => one.summary?.settings[name], said]),
    ["step time", progress("seconds"), seconds, true],
    ["rows per second", progress("rows_per_second"), digits, true],
    ["loss", progress("loss"), (value) => digits(Number(value))],
    ["bubble", progress("bubble"), percent],
    ["most memory of a process", (one) => one.summary?.peak_bytes, bytes, true],
    ["shown step", (one) => one.step.explanation?.step_seconds, seconds, true],
    ["computes, of a rank on average", mean((rank) => rank.compute_seconds), seconds, true],
    ...reasons.map((reason) => [`idle: ${reason}`, mean((rank) => rank.idle_seconds[reason]), seconds])
      .filter(([, value]) => found.some((one) => value(one) > 1e-6)),
  ];
  return make("table", { className: "figures-table" },
    make("thead", {}, make("tr", {}, make("td", {}), ...found.map((one) => make("th", { scope: "col" }, one.name)))),
    make("tbody", {}, ...rows.map(([name, value, text, relative]) => {
      const values = found.map(value);
      return make("tr", {}, make("th", { scope: "row" }, name), ...values.map((one, place) =>
        make("td", { data: { fact: name } }, one === undefined || one === null ? "–" : `${text(one)}${relative && place ? against(one, values[0]) : ""}`)));
    })));
}

const said = (value) => (Array.isArray(value) ? value.join(", ") || "none" : String(value));

function against(value, first) {
  return first ? ` (${value >= first ? "+" : "−"}${Math.abs(100 * (value / first - 1)).toFixed(1)}%)` : "";
}
