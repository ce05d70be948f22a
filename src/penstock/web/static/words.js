// What an action did, in words.

import { duration } from "./format.js";

const DOES = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient", SEND_F: "sends its output",
  RECV_F: "receives its input", SEND_B: "sends its input gradient", RECV_B: "receives its output gradient",
  REDUCE_GRAD: "sums gradients", UNSHARD: "gathers parameters", RESHARD: "frees gathered parameters",
};

/** What an op does, for a legend. */
export function meaning(op) {
  return DOES[op] ?? op;
}

/** An action in words: a title, and pairs of a name and a value. */
export function described(band, number, unit) {
  const { lane, place } = band.find(number);
  const op = band.ops[lane.op[place]];
  const microbatch = lane.microbatch[place];
  const whole = `microbatch ${Math.floor(microbatch / band.slices)}`;
  const piece = band.slices === 1 ? whole : `slice ${microbatch % band.slices} of ${whole}`;
  const of = microbatch >= 0 && op !== "REDUCE_GRAD" ? ` of ${piece}` : "";
  const start = lane.start[place];
  const end = lane.end[place];
  const facts = [["takes", duration(end - start, unit)], ["from", `${duration(start, unit)} to ${duration(end, unit)}`]];
  if (lane.waited?.[place] > 0) facts.push(["waited before", duration(lane.waited[place], unit)]);
  const needs = band.needs(number);
  if (needs.length) facts.push(["needs", listed(band, needs)]);
  const users = band.users(number);
  if (users.length) facts.push(["is needed by", listed(band, users)]);
  if (lane.critical?.[place]) facts.push(["on the critical path", "the step ends later if this does"]);
  return {
    label: band.label(lane, place, true),
    title: `${meaning(op)}${of} on stage ${lane.stage[place]}, ${lane.name}`,
    facts,
  };
}

function listed(band, numbers) {
  const names = numbers.slice(0, 4).map((number) => {
    const { lane, place } = band.find(number);
    return `${band.label(lane, place, true)} of ${lane.name}`;
  });
  return numbers.length > 4 ? `${names.join(", ")} and ${numbers.length - 4} more` : names.join(", ");
}

/** An element with a class, attributes and text or children. */
export function made(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Fills an element with what `described` found. */
export function tell(element, told) {
  const list = made("dl");
  for (const [name, value] of told.facts) list.append(made("div", {}, made("dt", {}, name), made("dd", {}, value)));
  element.replaceChildren(made("strong", {}, told.label), ` ${told.title}`, list);
}
