// The timeline: what each rank did and when, several bands under each other on one time axis. See `Timeline`.

import { AXIS, drawArrows, drawAxis, drawHead, HEAD, memoryLabel, mostOf } from "./around.js";
import { bandsOf, CHUNKS, KINDS } from "./bands.js";
import { colorsOf } from "./colors.js";
import { listen } from "./gestures.js";
import { paintLane, paintMemory, Scale } from "./paint.js";
import { described, made, meaning, tell } from "./words.js";

const GAP = 3;
const MEMORY = 26;
const PAPER = 740; // pixels: about the width of a sheet, to which the style sheet fits it
const LEAST = 1e-9; // of the whole: no zoom goes further
const HELP = "Arrows pan, + and − zoom, 0 fits all; Enter and Tab go through the actions, Escape leaves them.";
const IN_A_PICTURE = 10_000;
const MORE = "Scroll for more ranks.";

/**
 * A timeline on a canvas.
 *
 *     const view = new Timeline(element, data, {onselect, details, wheel, label, most})
 *     view.setData(data); view.setRange(t0, t1); view.range; view.fit(); view.refresh(); view.destroy()
 *
 * `data` is what penstock.report.web makes: {unit, ops, bands: [{name, note, ranks: [{name, start, end, waited, op, stage,
 * microbatch, needs, critical, memory}]}]}. Columns are packed ({type, base64}).
 * `critical` has an entry for each action, 1 on the critical path; `needs` lists numbers of actions, counted over the
 * ranks of the band. `onselect` gets {band, rank, number, label, title, facts} or null. `details`: the box below
 * (default true); `wheel`: "always", or "focused" to leave the wheel to the page until the timeline is clicked. `most`:
 * the most pixels that it is high (default: most of the window); beyond that it scrolls.
 */
export class Timeline {
  constructor(element, data, options = {}) {
    this.element = element;
    this.options = { details: true, wheel: "always", label: "Timeline", ...options };
    this.selected = null; // {band, number}
    this.hovered = null;
    this.critical = true;
    this.printing = false;
    this.top = 0;
    this._stop = new AbortController();
    this._build();
    this._listen();
    this.setData(data);
  }

  // -- for those who use it ---------------------------------------------------------------------------------------

  /** Shows other data. The range stays where all of it was not shown. */
  setData(data) {
    const kept = this.bands && !this.whole ? this.range : null;
    this.data = data;
    this.unit = data.unit ?? "s";
    this.bands = bandsOf(data);
    this.extent = Math.max(...this.bands.map((band) => band.end), 0) || 1;
    const shortest = Math.min(...this.bands.flatMap((band) => band.lanes.map((lane) => lane.shortest)), this.extent);
    this.least = Math.max(this.extent * LEAST, shortest / 4);
    this.selected = null;
    this.hovered = null;
    this._legend();
    this._layout();
    this._tell();
    if (kept) this.setRange(...kept);
    else this.fit();
  }

  get range() {
    return [this.t0, this.t1];
  }

  /** Shows the moments from t0 to t1; no less than 0 and no more than the end. */
  setRange(t0, t1) {
    const most = this.extent * 1.01;
    const span = Math.min(most, Math.max(this.least, t1 - t0));
    this.t0 = Math.min(Math.max(0, t0), most - span);
    this.t1 = this.t0 + span;
    this._later();
  }

  fit() {
    this.setRange(0, this.extent * 1.01);
  }

  get whole() {
    return this.t1 - this.t0 >= this.extent * 1.0099;
  }

  /** Reads the colors again, after the page's theme has changed. */
  refresh() {
    this.colors = colorsOf(this.element);
    this._later();
  }

  /** Selects an action by band and number; null selects none. */
  select(band, number = 0) {
    this.selected = band === null ? null : { band, number };
    this._tell();
    this._later();
    this.options.onselect?.(this._told(this.selected));
  }

  destroy() {
    this._stop.abort();
    this._size.disconnect();
    cancelAnimationFrame(this._frame);
    this.element.replaceChildren();
  }

  // -- what gestures call -----------------------------------------------------------------------------------------

  pan(pixels) {
    const moved = (pixels / this.width) * (this.t1 - this.t0);
    this.setRange(this.t0 + moved, this.t1 + moved);
  }

  /** By a factor about a place in pixels: by default about the selected action, if it is in sight, or the middle. */
  zoom(factor, x = this._center()) {
    const share = Math.min(1, Math.max(0, (x - this.left) / this.width));
    const span = Math.min(this.extent * 1.01, Math.max(this.least, (this.t1 - this.t0) * factor));
    const at = this.t0 + share * (this.t1 - this.t0);
    this.setRange(at - share * span, at + (1 - share) * span);
  }

  _center() {
    if (this.selected) {
      const { lane, place } = this.bands[this.selected.band].find(this.selected.number);
      const middle = (lane.start[place] + lane.end[place]) / 2;
      const [low, high] = this.range;
      if (middle >= low && middle <= high) return this.left + ((middle - low) / (high - low)) * this.width;
    }
    return this.left + this.width / 2;
  }

  scroll(pixels) {
    const before = this.top;
    this.scroller.scrollTop += pixels;
    return this.scroller.scrollTop !== before;
  }

  hover(x, y) {
    const found = this._under(x, y);
    if (found?.number === this.hovered?.number && found?.band === this.hovered?.band) return;
    this.hovered = found;
    this.canvas.style.cursor = found ? "pointer" : "grab";
    this.tip.hidden = !found;
    if (found) {
      tell(this.tip, described(this.bands[found.band], found.number, this.unit));
      const width = Math.min(300, this.canvas.clientWidth - 16);
      this.tip.style.maxWidth = `${width}px`;
      this.tip.style.left = `${Math.max(4, Math.min(x + 12, this.canvas.clientWidth - width - 8))}px`;
      this.tip.style.top = `${y + 20}px`;
    }
    this._later();
  }

  leave() {
    this.hover(-1, -1);
  }

  click(x, y) {
    const found = this._under(x, y);
    this.select(found?.band ?? null, found?.number);
  }

  /** To the next action (or the one before) of the selected one's band; 0: selects the first one in sight. */
  walk(by) {
    if (!by) {
      const band = this.bands.findIndex((one) => one.length);
      if (band < 0) return false;
      const lane = this.bands[band].lanes.find((one) => one.length);
      const place = lane.start.findIndex((start) => start >= this.t0);
      this.select(band, lane.first + Math.max(0, place));
      return true;
    }
    const { band, number } = this.selected;
    const next = number + by;
    if (next < 0 || next >= this.bands[band].length) {
      this.select(null);
      return false; // Tab leaves the timeline
    }
    this.select(band, next);
    this._show(next);
    return true;
  }

  /** To what another rank did at that time. */
  walkRank(by) {
    const flat = this.bands.flatMap((band, place) => band.lanes.map((lane) => [place, lane]));
    const { lane, place } = this.bands[this.selected.band].find(this.selected.number);
    const middle = (lane.start[place] + lane.end[place]) / 2;
    let at = flat.findIndex((one) => one[1] === lane) + by;
    while (flat[at] && !flat[at][1].length) at += by;
    if (!flat[at]) return;
    const [band, other] = flat[at];
    const near = Math.max(0, other.at(middle) >= 0 ? other.at(middle) : other.start.findIndex((one) => one >= middle));
    this.select(band, other.first + near);
    this._show(other.first + near);
  }

  _show(number) {
    const { lane, place } = this.bands[this.selected.band].find(number);
    const [t0, t1] = this.range;
    if (lane.start[place] < t0 || lane.end[place] > t1) {
      const middle = (lane.start[place] + lane.end[place]) / 2;
      this.setRange(middle - (t1 - t0) / 2, middle + (t1 - t0) / 2);
    }
    const { y, height } = this.places.get(lane);
    if (y < this.top) this.scroller.scrollTop = y - AXIS;
    else if (y + height > this.top + this.shown) this.scroller.scrollTop = y + height - this.shown + AXIS;
  }

  // -- the parts of the page --------------------------------------------------------------------------------------

  _build() {
    this.legend = made("div", { class: "tl-legend" });
    this.buttons = made("div", { class: "tl-buttons noprint" });
    this.bar = made("div", { class: "tl-bar" }, this.legend, this.buttons);
    this.canvas = made("canvas", {
      class: "tl-canvas", tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": `${this.options.label}. ${HELP}`,
    });
    this.spacer = made("div", { class: "tl-spacer", "aria-hidden": "true" });
    this.scroller = made("div", { class: "tl-scroller", tabindex: "-1" }, this.spacer, this.canvas);
    this.tip = made("div", { class: "tl-tip noprint", "aria-hidden": "true" });
    this.tip.hidden = true;
    this.frame = made("div", { class: "tl-frame" }, this.scroller, this.tip);
    this.details = made("div", { class: "tl-details noprint", role: "status", "aria-live": "polite" });
    this.element.classList.add("tl");
    this.element.replaceChildren(this.bar, this.frame, this.details);
    this.details.hidden = !this.options.details;
    const button = (text, label, action) => {
      const one = made("button", { type: "button", "aria-label": label, title: label }, text);
      one.addEventListener("click", action);
      this.buttons.append(one);
      return one;
    };
    this.path = button("critical path", "Mark the critical path", () => {
      this.critical = !this.critical;
      this.path.setAttribute("aria-pressed", String(this.critical));
      this._later();
    });
    this.path.setAttribute("aria-pressed", "true");
    button("−", "Zoom out", () => this.zoom(1 / 0.6));
    button("+", "Zoom in", () => this.zoom(0.6));
    button("Fit", "Show all", () => this.fit());
    this.marks = { font: getComputedStyle(this.element).fontFamily, strip: made("canvas", { width: 1, height: 1 }) };
    const rows = new Map();
    this.marks.row = (columns, which = 0) => {
      if (rows.get(which)?.width !== columns) rows.set(which, new ImageData(columns, 1));
      return rows.get(which);
    };
  }

  _listen() {
    const signal = this._stop.signal;
    listen(this, this.canvas, signal);
    this.scroller.addEventListener("scroll", () => this._later(), { signal });
    this._size = new ResizeObserver(() => this._layout());
    this._size.observe(this.element);
    const again = () => requestAnimationFrame(() => this.refresh());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again, { signal });
    matchMedia("print").addEventListener("change", (event) => this._print(event.matches), { signal });
    addEventListener("beforeprint", () => this._print(true), { signal });
    addEventListener("afterprint", () => this._print(false), { signal });
  }

  /** On paper all ranks are shown, in light colors. */
  _print(printing) {
    if (printing === this.printing) return;
    const root = document.documentElement;
    if (printing) this._theme = root.dataset.theme;
    if (printing) root.dataset.theme = "light";
    else if (this._theme) root.dataset.theme = this._theme;
    else delete root.dataset.theme;
    this.printing = printing;
    this.colors = colorsOf(this.element);
    this._layout();
    this._draw();
  }

  _legend() {
    const used = new Set();
    for (const band of this.bands) for (const lane of band.lanes) for (const op of lane.op) used.add(op);
    const shown = new Map();
    for (const [place, op] of this.data.ops.entries()) {
      if (used.has(place)) shown.set(KINDS.includes(op) ? op : "communication", KINDS.includes(op) ? meaning(this.bands[0], op) : "");
    }
    const sample = (backgrounds, text) => made("span", {}, ...backgrounds.map((background) => {
      const swatch = made("i");
      swatch.style.background = background; // a style attribute would be refused where a page allows none
      return swatch;
    }), text);
    const stages = Math.max(1, ...this.bands.flatMap((band) => band.lanes.map((lane) => lane.stages.length)));
    const chunks = Math.min(CHUNKS, stages);
    const shades = (kind) => Array.from({ length: chunks }, (_, chunk) => {
      const [even, odd] = [0, 1].map((parity) => `var(--op-${kind}-${chunk}-${parity})`);
      return `linear-gradient(90deg, ${even} 50%, ${odd} 50%)`;
    });
    this.legend.replaceChildren(
      ...[...shown].map(([kind, words]) => sample(kind === "communication" ? [`var(--op-${kind})`] : shades(kind), `${kind} ${words}`.trim())),
      sample(["var(--op-wait)"], "idle"),
      made("span", { class: "tl-shades" }, `shades: ${chunks > 1 ? `chunks 0 to ${chunks - 1}${stages > chunks ? " and later" : ""}, ` : ""}even and odd microbatches`),
    );
    this.path.hidden = !this.bands.some((band) => band.hasCritical);
  }

  _told(found) {
    if (!found) return null;
    const band = this.bands[found.band];
    return { ...found, rank: band.find(found.number).lane.rank, ...described(band, found.number, this.unit) };
  }

  _tell() {
    if (this.selected) tell(this.details, this._told(this.selected));
    else this.details.replaceChildren(made("span", { class: "tl-help" }, this.shown < this.total ? `${MORE} ${HELP}` : HELP));
  }

  // -- where things are, and drawing them -------------------------------------------------------------------------

  _layout() {
    if (!this.bands) return;
    const lanes = this.bands.reduce((count, band) => count + band.lanes.length, 0);
    const high = lanes <= 16 ? 24 : lanes <= 40 ? 18 : 12;
    const width = this.printing ? PAPER : Math.floor(this.scroller.clientWidth) || 300;
    this.left = width < 520 ? 52 : 76;
    this.width = Math.max(40, width - this.left - 6);
    this.places = new Map();
    this.heads = [];
    let y = AXIS;
    for (const band of this.bands) {
      if (band.name || band.note) {
        this.heads.push({ band, y });
        y += HEAD;
      }
      for (const lane of band.lanes) {
        const memory = lane.memory ? MEMORY : 0;
        this.places.set(lane, { y, height: high, memory });
        y += high + (memory ? memory + 2 : 0) + GAP;
      }
      y += 6;
    }
    this.total = y;
    this.shown = this.printing ? y : Math.min(y, this.options.most ?? this._most());
    this.scroller.style.height = `${this.shown}px`;
    this.spacer.style.height = `${y}px`;
    const ratio = Math.max(devicePixelRatio || 1, this.printing ? 2 : 1);
    this.marks.ratio = ratio;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.shown * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.shown}px`;
    this.colors ??= colorsOf(this.element);
    this._later();
  }

  /** Most of the window; in a picture, which nobody can scroll, all ranks, up to what a picture holds. */
  _most() {
    if ("picture" in document.documentElement.dataset) return IN_A_PICTURE;
    return Math.max(220, Math.round(innerHeight * 0.78));
  }

  _later() {
    this._frame ??= requestAnimationFrame(() => {
      this._frame = null;
      this._draw();
    });
  }

  _draw() {
    if (this.t1 === undefined || !this.places) return;
    const began = performance.now();
    const canvas = this.canvas.getContext("2d");
    const { colors, marks } = this;
    marks.critical = this.critical;
    this.top = this.printing ? 0 : this.scroller.scrollTop;
    canvas.setTransform(marks.ratio, 0, 0, marks.ratio, 0, 0);
    canvas.fillStyle = colors.page;
    canvas.fillRect(0, 0, this.left + this.width + 6, this.shown);
    const scale = new Scale(this.t0, this.t1, this.left, this.width);
    for (const band of this.bands) {
      for (const lane of band.lanes) this._drawLane(canvas, band, lane, scale);
    }
    for (const { band, y } of this.heads) drawHead(this, canvas, band, y - this.top);
    if (this.selected) drawArrows(this, canvas, scale, this.selected);
    if (this.hovered) drawArrows(this, canvas, scale, this.hovered);
    drawAxis(this, canvas, scale);
    this.drawn = performance.now() - began;
  }

  _drawLane(canvas, band, lane, scale) {
    const { y, height, memory } = this.places.get(lane);
    const top = y - this.top;
    if (top + height + memory < 0 || top > this.shown) return;
    const { colors } = this;
    paintLane(canvas, band, lane, scale, top, height, colors, this.marks);
    if (memory) paintMemory(canvas, lane.memory, scale, top + height + 2, memory, mostOf(band), colors);
    canvas.fillStyle = colors.muted;
    canvas.font = `${Math.min(12, height)}px ${this.marks.font}`;
    canvas.textAlign = "right";
    canvas.textBaseline = "middle";
    canvas.fillText(lane.name, this.left - 6, top + height / 2, this.left - 10);
    if (memory) memoryLabel(this, canvas, lane.memory, top + height + 2 + memory / 2);
  }

  _under(x, y) {
    if (x < this.left || x > this.left + this.width || y < AXIS) return null;
    const moment = new Scale(this.t0, this.t1, this.left, this.width).moment(x);
    for (const [place, band] of this.bands.entries()) {
      for (const lane of band.lanes) {
        const at = this.places.get(lane);
        const down = y + this.top - at.y;
        if (down < 0 || down > at.height) continue;
        const found = lane.at(moment, down > at.height / 2);
        return found < 0 ? null : { band: place, number: lane.first + found };
      }
    }
    return null;
  }
}
