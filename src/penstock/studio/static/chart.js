// A small line chart as SVG: the loss, the time of steps.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 120;
const MOST = 600; // points; more are thinned out

function shape(tag, attributes, text = null) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** A chart of [x, y] points, of which those without a number are left out. */
export function chart(name, points, text = String) {
  const known = points.filter(([, y]) => Number.isFinite(y));
  const shown = known.filter((_, place) => place % Math.ceil(known.length / MOST || 1) === 0 || place === known.length - 1);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img" });
  if (!shown.length) {
    svg.append(shape("text", { x: 8, y: 24, class: "muted" }, `${name}: nothing yet`));
    return svg;
  }
  const xs = shown.map(([x]) => x);
  const ys = shown.map(([, y]) => y);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (value) => 4 + ((WIDTH - 8) * (value - left)) / (right - left || 1);
  const y = (value) => HEIGHT - 20 - ((HEIGHT - 44) * (value - low)) / (high - low || 1);
  const last = shown[shown.length - 1];
  svg.setAttribute("aria-label", `${name}: ${text(last[1])} at step ${last[0]}, from ${text(low)} to ${text(high)}`);
  svg.append(
    shape("text", { x: 4, y: 14, class: "name" }, `${name} ${text(last[1])}`),
    shape("text", { x: WIDTH - 4, y: 14, "text-anchor": "end", class: "muted" }, `${text(low)} to ${text(high)}`),
    shape("polyline", { points: shown.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }),
    shape("text", { x: 4, y: HEIGHT - 4, class: "muted" }, `step ${left}`),
    shape("text", { x: WIDTH - 4, y: HEIGHT - 4, "text-anchor": "end", class: "muted" }, `step ${right}`),
  );
  return svg;
}
