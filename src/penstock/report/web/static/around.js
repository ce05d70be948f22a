// What is drawn around the lanes: heads of bands, the axis, a memory curve's figure, and arrows between actions.

import { size, ticks, tickText } from "./format.js";

export const AXIS = 24;
export const HEAD = 24;

/** A band's name, and what is to be said of it. */
export function drawHead(view, canvas, band, top) {
  canvas.textAlign = "left";
  canvas.textBaseline = "alphabetic";
  canvas.font = `600 13px ${view.marks.font}`;
  canvas.fillStyle = view.colors.ink;
  const room = view.left + view.width - 6;
  canvas.fillText(band.name, 6, top + HEAD - 7, room);
  const at = 6 + Math.min(room, canvas.measureText(band.name).width) + 10;
  if (!band.note || room - at < 40) return;
  canvas.font = `12px ${view.marks.font}`;
  canvas.fillStyle = view.colors.muted;
  canvas.fillText(fitting(canvas, band.note, room - at), at, top + HEAD - 7);
}

function fitting(canvas, text, width) {
  if (canvas.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && canvas.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}

/** Ticks and their times, above everything that scrolls. */
export function drawAxis(view, canvas, scale) {
  const { colors } = view;
  canvas.fillStyle = colors.page;
  canvas.fillRect(0, 0, view.left + view.width + 6, AXIS - 2);
  canvas.font = `11px ${view.marks.font}`;
  canvas.textBaseline = "middle";
  canvas.textAlign = "left";
  const { step, values } = ticks(view.t0, view.t1, view.width / 90);
  for (const value of values) {
    const x = scale.x(value);
    canvas.fillStyle = colors.rule;
    canvas.fillRect(Math.round(x), AXIS - 7, 1, 5);
    canvas.fillStyle = colors.muted;
    const text = tickText(value, step, view.t1, view.unit);
    const width = canvas.measureText(text).width;
    canvas.fillText(text, Math.min(Math.max(x - width / 2, 2), view.left + view.width - width), AXIS / 2 - 3);
  }
}

/** The highest that a band's memory is drawn: its peak, or the limit if that is not far above. */
export function mostOf(band) {
  const limit = Math.max(0, ...band.lanes.map((lane) => lane.memory?.limit ?? 0));
  return Math.max(band.peak * 1.05, limit <= 3 * band.peak ? limit * 1.05 : 0);
}

/** The peak of a rank's memory, left of its curve. */
export function memoryLabel(view, canvas, memory, middle) {
  canvas.fillStyle = view.colors.muted;
  canvas.font = `10px ${view.marks.font}`;
  canvas.textAlign = "right";
  canvas.textBaseline = "middle";
  canvas.fillText(size(memory.peak, memory.unit), view.left - 6, middle, view.left - 8);
}

/** An action with a frame around it, and arrows from what it needs and to what needs it. */
export function drawArrows(view, canvas, scale, { band: place, number }) {
  const band = view.bands[place];
  const box = boxOf(view, scale, band, number);
  canvas.save();
  canvas.beginPath();
  canvas.rect(view.left - 1, AXIS - 2, view.width + 5, view.shown);
  canvas.clip();
  canvas.strokeStyle = view.colors.ink;
  canvas.lineWidth = 2;
  canvas.strokeRect(box.left, box.top, Math.max(2, box.right - box.left), box.height);
  canvas.lineWidth = 1.6;
  for (const need of band.needs(number)) arrow(canvas, view.colors, boxOf(view, scale, band, need), box);
  canvas.setLineDash([4, 3]);
  for (const user of band.users(number).slice(0, 50)) arrow(canvas, view.colors, box, boxOf(view, scale, band, user));
  canvas.restore();
}

function boxOf(view, scale, band, number) {
  const { lane, place } = band.find(number);
  const { y, height } = view.places.get(lane);
  const clamp = (x) => Math.min(view.left + view.width + 40, Math.max(view.left - 40, x));
  const own = lane.half[place] ? height / 2 : height;
  const top = y - view.top + (lane.half[place] === 2 ? own : 0);
  return { left: clamp(scale.x(lane.start[place])), right: clamp(scale.x(lane.end[place])), top, height: own };
}

function arrow(canvas, colors, from, to) {
  const [x0, y0, x1, y1] = [from.right, from.top + from.height / 2, to.left, to.top + to.height / 2];
  const bend = Math.max(12, Math.min(60, Math.abs(x1 - x0) / 2));
  const sag = y0 === y1 && x1 - x0 > 4 ? Math.min(30, 8 + (x1 - x0) / 12) : 0; // within a lane: below what is between
  for (const [color, width] of [[colors.page, 4.5], [colors.ink, 1.6]]) {
    canvas.strokeStyle = color;
    canvas.lineWidth = width;
    canvas.beginPath();
    canvas.moveTo(x0, y0);
    canvas.bezierCurveTo(x0 + bend, y0 + sag, x1 - bend, y1 + sag, x1, y1);
    canvas.stroke();
  }
  canvas.fillStyle = colors.ink;
  canvas.beginPath();
  canvas.moveTo(x1, y1);
  canvas.lineTo(x1 - 7, y1 - 4);
  canvas.lineTo(x1 - 7, y1 + 4);
  canvas.fill();
}
