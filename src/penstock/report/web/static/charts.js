// A line over steps: the loss of a run and the like.

import { digits, ticks } from "./format.js";
import { made } from "./words.js";

const SPACE = { left: 58, right: 14, top: 10, bottom: 24 };

function drawn(tag, given, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/**
 * A line chart. `course` is {name, unit, x: numbers, y: numbers or null where there is none}.
 *
 *     new LineChart(element, course)
 *
 * The mouse and the arrow keys read single points, in words below.
 */
export class LineChart {
  constructor(element, course) {
    this.element = element;
    this.said = made("div", { class: "chart-said", role: "status", "aria-live": "polite" });
    this.course = course;
    this.points = course.x.map((x, place) => [x, course.y[place]]).filter(([, y]) => y !== null);
    this.at = null;
    this._draw();
    new ResizeObserver(() => this._draw()).observe(element);
  }

  _draw() {
    const width = Math.max(280, this.element.clientWidth || 600);
    if (width === this.width) return;
    this.width = width;
    this.height = Math.round(Math.min(260, Math.max(170, width * 0.3)));
    const { name } = this.course;
    const label = this.points.length
      ? `${name} over steps: from ${this._value(0)} to ${this._value(this.points.length - 1)}`
      : `${name}: no values`;
    this.svg = drawn("svg", {
      class: "chart", viewBox: `0 0 ${width} ${this.height}`, role: "img", tabindex: "0", "aria-label": label,
    });
    this._scales();
    this._axes();
    this.svg.append(drawn("path", { class: "line", d: this._path() }));
    this.dot = drawn("circle", { class: "dot", r: 4, visibility: "hidden" });
    this.svg.append(this.dot);
    this.svg.addEventListener("pointermove", (event) => this._near(event));
    this.svg.addEventListener("pointerleave", () => this._say(null));
    this.svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !this.points.length) return;
      event.preventDefault();
      this._say(Math.min(this.points.length - 1, Math.max(0, (this.at ?? (by > 0 ? -1 : this.points.length)) + by)));
    });
    this.element.replaceChildren(this.svg, this.said);
  }

  _scales() {
    const range = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
    let [low, high] = range(this.points.map(([, y]) => y));
    if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - Math.abs(low || 1) / 2, low + Math.abs(low || 1) / 2] : [0, 1];
    let [first, last] = range(this.points.map(([x]) => x));
    if (!(last > first)) [first, last] = Number.isFinite(first) ? [first - 1, first + 1] : [0, 1];
    this.low = low - (high - low) * 0.04;
    this.high = high + (high - low) * 0.04;
    Object.assign(this, { first, last });
  }

  _x(value) {
    return SPACE.left + ((value - this.first) / (this.last - this.first)) * (this.width - SPACE.left - SPACE.right);
  }

  _y(value) {
    const share = (value - this.low) / (this.high - this.low);
    return this.height - SPACE.bottom - share * (this.height - SPACE.top - SPACE.bottom);
  }

  _axes() {
    for (const value of ticks(this.low, this.high, 5).values) {
      const y = this._y(value);
      this.svg.append(
        drawn("line", { class: "grid", x1: SPACE.left, x2: this.width - SPACE.right, y1: y, y2: y }),
        drawn("text", { x: SPACE.left - 8, y: y + 4, "text-anchor": "end" }, digits(value, 4)),
      );
    }
    const whole = ticks(this.first, this.last, Math.max(2, this.width / 90));
    for (const value of whole.values.filter(Number.isInteger)) {
      this.svg.append(drawn("text", { x: this._x(value), y: this.height - 6, "text-anchor": "middle" }, digits(value, 9)));
    }
  }

  /** The line, broken where values are missing; of many points in one pixel the lowest and the highest. */
  _path() {
    const parts = [];
    let open = false;
    let pixel = null;
    for (const [place, x] of this.course.x.entries()) {
      const value = this.course.y[place];
      if (value === null) {
        open = false;
        pixel = null;
        continue;
      }
      const at = [this._x(x), this._y(value)];
      const column = Math.round(at[0] * 2);
      if (open && pixel && pixel.column === column) {
        if (at[1] < pixel.low || at[1] > pixel.high) parts.push(`L${at[0].toFixed(1)} ${at[1].toFixed(1)}`);
        pixel.low = Math.min(pixel.low, at[1]);
        pixel.high = Math.max(pixel.high, at[1]);
        continue;
      }
      parts.push(`${open ? "L" : "M"}${at[0].toFixed(1)} ${at[1].toFixed(1)}`);
      if (!open) parts.push("h0.01"); // a single point is seen, too
      open = true;
      pixel = { column, low: at[1], high: at[1] };
    }
    return parts.join("");
  }

  _near(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.width;
    const sought = this.first + ((x - SPACE.left) / (this.width - SPACE.left - SPACE.right)) * (this.last - this.first);
    let best = null;
    for (const [place, [at]] of this.points.entries()) {
      if (best === null || Math.abs(at - sought) < Math.abs(this.points[best][0] - sought)) best = place;
    }
    this._say(best);
  }

  _value(place) {
    const { unit } = this.course;
    return `${digits(this.points[place][1], 5)}${unit ? ` ${unit}` : ""}`;
  }

  _say(place) {
    this.at = place;
    this.dot.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place === null) {
      this.said.textContent = "";
      return;
    }
    const [x, y] = this.points[place];
    this.dot.setAttribute("cx", this._x(x));
    this.dot.setAttribute("cy", this._y(y));
    this.said.textContent = `step ${digits(x, 9)}: ${this._value(place)}`;
  }
}
