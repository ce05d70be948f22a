// A report's page: its timeline, its courses, and the actions as a table for those who read instead of look.

import { LineChart } from "./charts.js";
import { duration } from "./format.js";
import { Timeline } from "./timeline.js";
import { made } from "./words.js";

const ROWS = 200;

function dataOf(id) {
  const element = document.getElementById(id);
  return element ? JSON.parse(element.textContent) : null;
}

/** Fills the list of actions, a band and a rank at a time, when it is opened. */
function actionsTable(details, view) {
  const ranks = view.bands.flatMap((band) => band.lanes.map((lane) => ({ band, lane })));
  const choice = made("select", { "aria-label": "Which rank" });
  for (const { band, lane } of ranks) choice.append(made("option", {}, `${band.name}: ${lane.name}`));
  const place = made("div", { class: "wide", tabindex: "0" });
  const fill = () => {
    const { band, lane } = ranks[choice.selectedIndex];
    const head = made("tr", {}, ...["action", "starts", "takes", "waited before"].map((name) => made("th", {}, name)));
    const rows = [];
    for (let at = 0; at < Math.min(ROWS, lane.length); at += 1) {
      const times = [lane.start[at], lane.end[at] - lane.start[at], lane.waited?.[at] ?? 0];
      const cells = [band.label(lane, at, true), ...times.map((time) => duration(time, view.unit))];
      rows.push(made("tr", {}, ...cells.map((text) => made("td", {}, text))));
    }
    const more = lane.length > ROWS ? `the first ${ROWS} of ${lane.length.toLocaleString("en-US")} actions` : "";
    place.replaceChildren(made("table", {}, head, ...rows), made("p", { class: "notes" }, more));
  };
  choice.addEventListener("change", fill);
  details.addEventListener("toggle", () => {
    if (details.open && !place.hasChildNodes() && ranks.length) fill();
  });
  details.append(choice, place);
}

const data = dataOf("timeline-data");
const target = document.getElementById("timeline");
if (target && data) {
  const view = new Timeline(target, data, { wheel: "focused", label: document.title });
  actionsTable(document.getElementById("actions"), view);
  window.timeline = view;
}
const courses = dataOf("course-data") ?? [];
for (const element of document.querySelectorAll("[data-course]")) {
  new LineChart(element, courses[Number(element.dataset.course)]);
}
