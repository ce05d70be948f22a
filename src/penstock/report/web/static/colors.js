// The colors of a page, read from its style sheet, which penstock.report.colors makes: scripts hold none of their own.

import { CHUNKS, KINDS, PARITIES } from "./bands.js";

const NAMES = ["page", "ink", "muted", "rule", "accent"];
const PLAIN = "communication"; // has no shades

/** [red, green, blue] of #rrggbb. */
function rgb(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

/**
 * The colors now: by name; and for each kind its fills and the inks on them, by variant (two for each chunk: even and
 * odd microbatches), with the mean of the fills of the first chunk for where boxes are too narrow to be told apart.
 */
export function colorsOf(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(`--${name}`).trim() || "#808080";
  const found = Object.fromEntries(NAMES.map((name) => [name, read(name)]));
  found.idle = read("op-wait");
  found.memory = read("op-F");
  found.limit = found.accent;
  found.idleRgb = rgb(found.idle);
  found.accentRgb = rgb(found.accent);
  const variants = Array.from({ length: CHUNKS * PARITIES }, (_, at) => `${Math.floor(at / PARITIES)}-${at % PARITIES}`);
  found.kinds = KINDS.map((kind) => {
    const all = (what) => variants.map((variant) => read(kind === PLAIN ? `${what}-${kind}` : `${what}-${kind}-${variant}`));
    const fills = all("op");
    const [one, two] = fills.map(rgb);
    return { fills, inks: all("ink"), mean: one.map((value, at) => (value + two[at]) / 2) };
  });
  return found;
}
