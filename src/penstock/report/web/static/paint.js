// Drawing one lane. Where actions are wide each is a box; where several share a pixel, a pixel's color says how much of
// its time went to which kind. The second costs the same for a hundred actions and for a million.

import { KINDS, lastAtMost } from "./bands.js";

const NARROW = 3; // pixels: below this, on average, boxes cannot be told apart
const NAMED = 10; // pixels: from this width on a box may have its name

/** A window on the time axis: moments from t0 to t1 on pixels from left to left + width. */
export class Scale {
  constructor(t0, t1, left, width) {
    Object.assign(this, { t0, t1, left, width, perSecond: width / (t1 - t0) });
  }

  x(moment) {
    return this.left + (moment - this.t0) * this.perSecond;
  }

  moment(x) {
    return this.t0 + (x - this.left) / this.perSecond;
  }
}

/** Paints the actions of a lane between `top` and `top + height`. */
export function paintLane(canvas, band, lane, scale, top, height, colors, marks) {
  canvas.fillStyle = colors.idle;
  canvas.fillRect(scale.left, top, scale.width, height);
  if (!lane.length) return;
  const [begin, stop] = lane.seen(scale.t0, scale.t1);
  if (stop - begin > scale.width / NARROW) paintColumns(canvas, lane, scale, top, height, colors, marks);
  else paintBoxes(canvas, band, lane, scale, top, height, colors, marks, begin, stop);
}

function paintBoxes(canvas, band, lane, scale, top, height, colors, marks, begin, stop) {
  canvas.font = `${Math.min(12, height - 4)}px ${marks.font}`;
  canvas.textAlign = "center";
  canvas.textBaseline = "middle";
  const right = scale.left + scale.width;
  const bar = Math.max(2, Math.round(height / 7));
  for (let place = begin; place < stop; place += 1) {
    const half = lane.half[place];
    const from = Math.max(scale.left, scale.x(lane.start[place]));
    const to = Math.min(right, scale.x(lane.end[place]));
    const width = Math.max(to - from, lane.end[place] > lane.start[place] ? 0.7 : 0.35);
    if (from > right || to < scale.left) continue;
    const own = half ? height / 2 : height;
    const y = half === 2 ? top + own : top;
    const kind = colors.kinds[lane.kind[place]];
    const gap = width > 4 ? 1 : 0;
    canvas.fillStyle = kind.fills[lane.variant[place]];
    canvas.fillRect(from, y, width - gap, own - (half === 1 ? 1 : 0));
    if (width > NAMED && own >= 9) {
      const name = band.label(lane, place);
      const label = [name, name.replace(/^.*[A-Z]/, "")].find((one) => one.length * 6.6 < width - 2); // the microbatch at least
      if (label) {
        canvas.fillStyle = kind.inks[lane.variant[place]];
        canvas.fillText(label, from + (width - gap) / 2, y + own / 2 + 0.5);
      }
    }
    if (marks.critical && lane.critical?.[place]) {
      canvas.fillStyle = colors.accent;
      canvas.fillRect(from, y + own - bar, width - gap, bar);
    }
  }
}

function paintColumns(canvas, lane, scale, top, height, colors, marks) {
  const ratio = marks.ratio;
  const columns = Math.max(1, Math.round(scale.width * ratio));
  const image = marks.row(columns);
  const path = marks.critical && lane.critical ? marks.row(columns, 1) : null;
  fillColumns(lane, scale, columns, colors, image.data, path?.data);
  stretch(canvas, image, marks, scale, top, height);
  const bar = Math.max(2, Math.round(height / 7));
  if (path) stretch(canvas, path, marks, scale, top + height - bar, bar);
}

/** One color for each column of pixels: the mean of what ran in it, idle time as the background. */
function fillColumns(lane, scale, columns, colors, pixels, path) {
  const means = colors.kinds.map((kind) => kind.mean);
  const before = new Float64Array(KINDS.length + 1);
  const now = new Float64Array(KINDS.length + 1);
  const each = (scale.t1 - scale.t0) / columns;
  let place = totals(lane, scale.t0, 0, before);
  for (let column = 0; column < columns; column += 1) {
    place = totals(lane, scale.t0 + (column + 1) * each, Math.max(0, place), now);
    let rest = 1;
    let red = 0;
    let green = 0;
    let blue = 0;
    for (let kind = 0; kind < KINDS.length; kind += 1) {
      const share = Math.min(rest, (now[kind] - before[kind]) / each);
      if (share <= 0) continue;
      const mean = means[kind];
      rest -= share;
      red += share * mean[0];
      green += share * mean[1];
      blue += share * mean[2];
    }
    const at = 4 * column;
    pixels[at] = red + rest * colors.idleRgb[0];
    pixels[at + 1] = green + rest * colors.idleRgb[1];
    pixels[at + 2] = blue + rest * colors.idleRgb[2];
    pixels[at + 3] = 255;
    if (path) {
      const [r, g, b] = colors.accentRgb;
      path[at] = r;
      path[at + 1] = g;
      path[at + 2] = b;
      path[at + 3] = now[KINDS.length] - before[KINDS.length] > 0.02 * each ? 255 : 0;
    }
    before.set(now);
  }
}

/** How long each kind ran up to a moment, and the critical path last. Returns the place that this was read at. */
function totals(lane, moment, from, found) {
  const place = lastAtMost(lane.start, moment, from);
  const at = Math.max(0, place);
  for (let kind = 0; kind < KINDS.length; kind += 1) found[kind] = lane.until[kind][at];
  found[KINDS.length] = lane.criticalUntil[at];
  if (place >= 0) {
    const ran = Math.min(moment, lane.end[place]) - lane.start[place];
    found[lane.kind[place]] += lane.half[place] ? ran / 2 : ran;
    if (lane.critical?.[place]) found[KINDS.length] += ran;
  }
  return place;
}

function stretch(canvas, image, marks, scale, top, height) {
  marks.strip.width = image.width;
  marks.strip.getContext("2d").putImageData(image, 0, 0);
  canvas.imageSmoothingEnabled = false;
  canvas.drawImage(marks.strip, 0, 0, image.width, 1, scale.left, top, scale.width, height);
}

/** Paints a rank's memory as steps, the highest of each pixel, with the limit if it is within the picture. */
export function paintMemory(canvas, memory, scale, top, height, most, colors) {
  const { t, bytes } = memory;
  if (!t.length || !(most > 0)) return;
  const y = (value) => top + height - (value / most) * (height - 2);
  const right = scale.left + scale.width;
  canvas.beginPath();
  canvas.moveTo(scale.left, top + height);
  let place = Math.max(0, lastAtMost(t, scale.t0));
  let level = t[place] <= scale.t0 ? bytes[place] : 0;
  for (let x = scale.left; x < right; x += 1) {
    const until = scale.moment(x + 1);
    let high = level;
    while (place + 1 < t.length && t[place + 1] <= until) {
      place += 1;
      level = bytes[place];
      if (level > high) high = level;
    }
    if (t[0] > until) high = 0;
    canvas.lineTo(x, y(high));
    canvas.lineTo(x + 1, y(high));
  }
  canvas.lineTo(right, top + height);
  canvas.closePath();
  canvas.globalAlpha = 0.3;
  canvas.fillStyle = colors.memory;
  canvas.fill();
  canvas.globalAlpha = 1;
  canvas.strokeStyle = colors.memory;
  canvas.lineWidth = 1;
  canvas.stroke();
  if (memory.limit !== null && memory.limit <= most) {
    canvas.strokeStyle = colors.limit;
    canvas.setLineDash([5, 3]);
    canvas.beginPath();
    canvas.moveTo(scale.left, y(memory.limit));
    canvas.lineTo(right, y(memory.limit));
    canvas.stroke();
    canvas.setLineDash([]);
  }
}
