// The data of a timeline as columns that can be searched: a band holds lanes, a lane the actions of one rank in order.

const TYPES = { f8: Float64Array, i4: Int32Array, i2: Int16Array, i1: Int8Array };

/** Kinds that are told apart by color. What is none of the first four is communication. */
export const KINDS = ["F", "B", "I", "W", "communication"];
const OTHER = 4;
export const PARITIES = 2;
export const CHUNKS = 3;

/** A column, packed as {type, base64} by penstock.report.web; null if there is none. */
function column(given) {
  if (!given) return null;
  const text = atob(given.base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) bytes[place] = text.charCodeAt(place);
  return new TYPES[given.type](bytes.buffer);
}

/** The last place whose value is at most `sought`; -1 if there is none. `from` is a place that is known to be early enough. */
export function lastAtMost(values, sought, from = 0) {
  let low = from;
  let high = values.length;
  for (let step = 1; low + step < high && step > 0; step *= 2) {
    if (values[low + step] > sought) high = low + step;
  }
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= sought) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The actions of one rank. Places count from 0 in the lane; numbers count over all lanes of the band. */
export class Lane {
  constructor(given, rank, first, ops) {
    this.name = given.name;
    this.rank = rank;
    this.first = first;
    this.start = column(given.start);
    this.end = column(given.end);
    this.waited = column(given.waited);
    this.op = column(given.op);
    this.stage = column(given.stage);
    this.microbatch = column(given.microbatch);
    this.peer = column(given.peer);
    this.critical = column(given.critical);
    this.needs = needsOf(given.needs);
    this.memory = memoryOf(given.memory);
    this.stages = [...new Set(this.stage)].sort((one, two) => one - two);
    this._classify(ops);
    this._accumulate();
  }

  get length() {
    return this.start.length;
  }

  _classify(ops) {
    const kinds = ops.map((name) => (KINDS.includes(name) ? KINDS.indexOf(name) : OTHER));
    const chunks = new Map(this.stages.map((stage, place) => [stage, Math.min(place, CHUNKS - 1)]));
    this.kind = new Uint8Array(this.length);
    this.variant = new Uint8Array(this.length);
    this.half = new Uint8Array(this.length); // 1, 2: the first and second of two that overlap
    for (let place = 0; place < this.length; place += 1) {
      this.kind[place] = kinds[this.op[place]] ?? OTHER;
      this.variant[place] = PARITIES * chunks.get(this.stage[place]) + (this.microbatch[place] & 1);
      const took = place ? this.end[place - 1] - this.start[place - 1] : 0;
      if (place && this.half[place - 1] !== 1 && this.end[place - 1] - this.start[place] > 1e-6 * took) {
        this.half[place - 1] = 1;
        this.half[place] = 2;
      }
    }
  }

  /** Sums from the first action on, so that what a pixel covers is known without a look at each action in it. */
  _accumulate() {
    this.until = KINDS.map(() => new Float64Array(this.length + 1));
    this.criticalUntil = new Float64Array(this.length + 1);
    this.shortest = Infinity;
    for (let place = 0; place < this.length; place += 1) {
      const took = this.end[place] - this.start[place];
      if (took > 0 && took < this.shortest) this.shortest = took;
      for (let kind = 0; kind < KINDS.length; kind += 1) this.until[kind][place + 1] = this.until[kind][place];
      this.until[this.kind[place]][place + 1] += this.half[place] ? took / 2 : took;
      this.criticalUntil[place + 1] = this.criticalUntil[place] + (this.critical?.[place] ? took : 0);
    }
  }

  /** The place of the action that runs at a moment; -1 if the rank is idle. `low`: of two that overlap, the second. */
  at(moment, low = false) {
    let place = lastAtMost(this.start, moment);
    while (place > 0 && this.end[place] <= this.start[place]) place -= 1; // one that takes no time hides none
    if (place < 0 || this.end[place] < moment) return -1;
    if (this.half[place] === 2 && !low && this.end[place - 1] >= moment) return place - 1;
    return place;
  }

  /** The first place that may be seen from a moment on, and the place after the last one up to another. */
  seen(from, to) {
    let begin = Math.max(0, lastAtMost(this.start, from));
    while (begin > 0 && this.end[begin - 1] > from) begin -= 1;
    return [begin, lastAtMost(this.start, to, begin) + 1];
  }
}

function needsOf(given) {
  return given ? { at: column(given.at), to: column(given.to) } : null;
}

function memoryOf(given) {
  if (!given) return null;
  const t = column(given.t);
  const bytes = column(given.bytes);
  let peak = 0;
  for (const one of bytes) if (one > peak) peak = one;
  return { ...given, t, bytes, peak, limit: given.limit ?? null, unit: given.unit ?? "bytes" };
}

/** Several ranks on one clock: a measured step, a prediction, one of several schedules. */
export class Band {
  constructor(given, ops) {
    this.name = given.name ?? "";
    this.note = given.note ?? "";
    this.ops = ops;
    this.said = given.said ?? {}; // a sentence for each op, as penstock.schedule.describe writes it
    this.lanes = [];
    let first = 0;
    for (const [rank, each] of given.ranks.entries()) {
      const lane = new Lane(each, rank, first, ops);
      this.lanes.push(lane);
      first += lane.length;
    }
    this.length = first;
    this.end = this.lanes.reduce((most, lane) => lane.end.reduce((one, two) => (two > one ? two : one), most), 0);
    this.peak = this.lanes.reduce((most, lane) => Math.max(most, lane.memory?.peak ?? 0), 0);
    this.hasCritical = this.lanes.some((lane) => lane.critical);
    this.chunked = this.lanes.some((lane) => lane.stages.length > 1);
  }

  /** The lane and the place of an action by its number in the band. */
  find(number) {
    const rank = lastAtMost(this.lanes.map((lane) => lane.first), number);
    // ranks without actions share their first number with the next rank
    return { lane: this.lanes[rank], place: number - this.lanes[rank].first };
  }

  /** What an action needs, and what needs it, by number. */
  needs(number) {
    const { lane, place } = this.find(number);
    return lane.needs ? [...lane.needs.to.slice(lane.needs.at[place], lane.needs.at[place + 1])] : [];
  }

  users(number) {
    this._users ??= this._reversed();
    return this._users.get(number) ?? [];
  }

  _reversed() {
    const found = new Map();
    for (const lane of this.lanes) {
      if (!lane.needs) continue;
      for (let place = 0; place < lane.length; place += 1) {
        for (let entry = lane.needs.at[place]; entry < lane.needs.at[place + 1]; entry += 1) {
          const needed = lane.needs.to[entry];
          if (!found.has(needed)) found.set(needed, []);
          found.get(needed).push(lane.first + place);
        }
      }
    }
    return found;
  }

  /** An action's name: 2F3, or F3 where each rank has one stage; in a box "send 3". */
  label(lane, place, full = false) {
    const name = this.ops[lane.op[place]];
    const at = lane.microbatch[place];
    const number = at < 0 ? "" : at;
    if (!full && !KINDS.includes(name)) return `${name.split("_")[0].toLowerCase()} ${number}`.trim();
    return `${full || this.chunked ? lane.stage[place] : ""}${name}${number}`;
  }
}

/** The bands of what penstock.report.web makes of a timeline. */
export function bandsOf(data) {
  return (data.bands ?? []).map((band) => new Band(band, data.ops));
}
