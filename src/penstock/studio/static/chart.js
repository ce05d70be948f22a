// A small line chart: the loss, the time of steps. The line is SVG, its words are text of the page.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 100;
const MOST = 600; // points; more are thinned out

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const line = (left, right) => make("div", { className: "ends" }, make("span", {}, left), make("span", { className: "muted" }, right));

/** A chart of [x, y] points, of which those without a number are left out. */
export function chart(name, points, text = String) {
  const known = points.filter(([, y]) => Number.isFinite(y));
  if (!known.length) return make("figure", { className: "chart" }, line(`${name}: nothing yet`, ""));
  const every = Math.ceil(known.length / MOST);
  const shown = known.filter((_, place) => place % every === 0 || place === known.length - 1);
  const ys = shown.map(([, y]) => y);
  const [left, right, low, high] = [shown[0][0], shown[shown.length - 1][0], Math.min(...ys), Math.max(...ys)];
  const x = (value) => (WIDTH * (value - left)) / (right - left || 1);
  const y = (value) => HEIGHT - 4 - ((HEIGHT - 8) * (value - low)) / (high - low || 1);
  const now = text(ys[ys.length - 1]);
  const svg = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${name}: ${now} at step ${right}, from ${text(low)} to ${text(high)}`,
  });
  svg.append(shape("polyline", { points: shown.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
  return make("figure", { className: "chart" }, line(`${name} ${now}`, `${text(low)} to ${text(high)}`), svg, line(`step ${left}`, `step ${right}`));
}
