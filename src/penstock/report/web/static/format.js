// Numbers and times as people read them, and round places for ticks.

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

/** Significant digits without an exponent and without trailing zeros: 0.0012, 12.5, 1,200. */
export function digits(value, most = 4) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const places = Math.min(12, Math.max(0, most - 1 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en-US", { maximumFractionDigits: places });
}

/** A duration in the unit that suits it; slots and other units are plain numbers. */
export function duration(value, unit = "s", most = 4) {
  if (unit !== "s") return `${digits(value, most)} ${Math.abs(value) === 1 ? unit.replace(/s$/, "") : unit}`;
  const size = Math.abs(value);
  const [scale, name] = UNITS.find(([least]) => size >= least * 0.99995) ?? (size ? UNITS[3] : UNITS[0]);
  return `${digits(value / scale, most)} ${name}`;
}

/** A size in bytes, in powers of 1,000, or a plain number where the unit is not bytes. */
export function size(value, unit = "bytes") {
  if (unit !== "bytes") return `${digits(value, 3)} ${unit}`;
  const names = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (Math.abs(value) >= 999.5 && place < names.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${digits(value, 3)} ${names[place]}`;
}

/** Round values from low to high, about `count` of them: steps of 1, 2 or 5 times a power of ten. */
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0) || !(count > 0)) return { step: 1, values: [] };
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((one) => one * power >= raw) ?? 10);
  const values = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) {
    values.push(place * step);
  }
  return { step, values };
}

/** A tick's text: all ticks of an axis in one unit, with the decimals that tell them apart. */
export function tickText(value, step, high, unit = "s") {
  const largest = Math.max(Math.abs(high), step);
  const [scale, name] = unit === "s" ? UNITS.find(([least]) => largest >= least) ?? UNITS[3] : [1, ""];
  const places = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  return `${(value / scale).toFixed(Math.min(places, 12))}${name ? ` ${name}` : ""}`;
}
