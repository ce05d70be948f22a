// What an action did, in words.

import { duration } from "./format.js";

/** What an op does, for a legend: what its sentence begins with. */
export function meaning(band, op) {
  return (band.said[op] ?? op).split(/[[,]/)[0];
}

/** A sentence of penstock.schedule.describe: what stands in brackets is left out if one of its values is missing. */
function filled(sentence, values) {
  const known = (part) => [...part.matchAll(/\{(\w+)\}/g)].every(([, name]) => values[name] >= 0);
  const whole = sentence.replace(/\[([^\]]*)\]/g, (_, part) => (known(part) ? part : ""));
  return whole.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** An action in words: `forward of microbatch 3, stage 1`. */
function said(band, lane, place) {
  const op = band.ops[lane.op[place]];
  const values = { stage: lane.stage[place], peer: lane.peer?.[place] ?? -1, microbatch: lane.microbatch[place] };
  return filled(band.said[op] ?? op, values);
}

/** An action in words: a title, and pairs of a name and a value. */
export function described(band, number, unit) {
  const { lane, place } = band.find(number);
  const start = lane.start[place];
  const end = lane.end[place];
  const facts = [["takes", duration(end - start, unit)], ["from", `${duration(start, unit)} to ${duration(end, unit)}`]];
  if (lane.waited?.[place] > 0) facts.push(["waited before", duration(lane.waited[place], unit)]);
  const needs = band.needs(number);
  if (needs.length) facts.push(["needs", listed(band, needs)]);
  const users = band.users(number);
  if (users.length) facts.push(["is needed by", listed(band, users)]);
  if (lane.critical?.[place]) facts.push(["on the critical path", "delaying it delays the step"]);
  return {
    label: band.label(lane, place, true),
    title: `${said(band, lane, place)}, ${lane.name}`,
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
