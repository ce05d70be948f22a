// A small line chart: the loss, the time of steps. The lines are SVG, their words are text of the page.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 100;
const MOST = 600; // points of a line; more are thinned out

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const line = (left, right) => make("div", { className: "ends" }, make("span", {}, left), make("span", { className: "muted" }, right));

/** Its points with a number, up to MOST of them. */
function thinned(points) {
  const known = points.filter(([, y]) => Number.isFinite(y));
  const every = Math.ceil(known.length / MOST);
  return known.filter((_, place) => place % every === 0 || place === known.length - 1);
}

/** A chart of one line of [x, y] points, or of several over each other, each {name, points}. */
export function chart(name, points, text = String, lines = [{ points }]) {
  const shown = lines.map((one) => thinned(one.points));
  const all = shown.flat();
  if (!all.length) return make("figure", { className: "chart" }, line(`${name}: nothing yet`, ""));
  const [xs, ys] = [0, 1].map((axis) => all.map((point) => point[axis]));
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (value) => (WIDTH * (value - left)) / (right - left || 1);
  const y = (value) => HEIGHT - 4 - ((HEIGHT - 8) * (value - low)) / (high - low || 1);
  const last = shown.map((known, place) => {
    const now = known.length ? text(known[known.length - 1][1]) : "nothing yet";
    return lines[place].name ? `${lines[place].name} ${now}` : now;
  });
  const svg = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${name}: ${last.join(", ")} at step ${right}, from ${text(low)} to ${text(high)}`,
  });
  for (const [place, known] of shown.entries()) {
    const path = known.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
    svg.append(shape("polyline", { points: path, class: `line-${place}` }));
  }
  const legend = lines.length > 1 ? make("div", { className: "ends" }, ...last.map((said, place) => make("span", { className: `key key-${place}` }, said))) : null;
  const head = lines.length > 1 ? name : `${name} ${last[0]}`;
  return make("figure", { className: "chart" }, line(head, `${text(low)} to ${text(high)}`), legend, svg, line(`step ${left}`, `step ${right}`));
}
