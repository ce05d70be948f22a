// Elements, requests, and numbers as text. Text from elsewhere becomes text nodes, never markup.

import { digits, duration, size } from "../web/format.js";

/** An element: properties (data as `data: {...}`, events as `on: {...}`), then children, of which null is left out. */
export function make(tag, properties = {}, ...children) {
  const { data, on, aria, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, data);
  for (const [name, value] of Object.entries(aria ?? {})) element.setAttribute(name === "role" ? name : `aria-${name}`, value);
  for (const [name, act] of Object.entries(on ?? {})) element.addEventListener(name, act);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Shows the server the token of a link, for which it leaves a cookie. */
export async function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) await fetch("api/enter", { headers: { Authorization: `Bearer ${token}` } });
}

/** The answer of the server to a question. Throws an Error with its reason. */
export async function ask(path, given = {}, signal = undefined) {
  // with this header, what cannot be answered is no failure, which a browser would note on its console
  const response = await fetch(`${path}?${asked(given)}`, { signal, headers: { "Penstock-Page": "yes" } });
  const answer = await response.json();
  if (!response.ok || answer.error) throw new Error(answer.error ?? `${response.status} ${response.statusText}`);
  return answer;
}

/** Parameters of an address; what is empty is left out. */
export function asked(given) {
  const kept = Object.entries(given).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
}

/**
 * Runs an asynchronous act again and again, one at a time: what is asked for while it runs is done once, afterwards,
 * with the newest arguments. So an answer never comes later than one to a newer question.
 */
export function newestOnly(act) {
  let running = false;
  let next = null;
  return async function again(...given) {
    next = given;
    if (running) return;
    running = true;
    while (next) {
      const now = next;
      next = null;
      await act(...now);
    }
    running = false;
  };
}

export { digits };

const known = (text) => (value) => (value === null || value === undefined ? "–" : text(value));
export const percent = known((value) => `${(100 * value).toFixed(1)}%`);
/** Seconds, and bytes, in the unit that suits them. */
export const seconds = known((value) => duration(value));
export const bytes = known((value) => size(value));

const trouble = document.getElementById("trouble");

/** Shows what went wrong above everything, or takes it away. */
export function tell(text) {
  trouble.hidden = !text;
  trouble.textContent = text ?? "";
}
