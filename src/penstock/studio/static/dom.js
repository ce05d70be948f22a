// Elements, requests, and numbers as text. Text from elsewhere becomes text nodes, never markup.

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

export function digits(value, most = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const places = Math.min(12, Math.max(0, most - 1 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en-US", { maximumFractionDigits: places });
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

/** Seconds in the unit that suits them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1 || !size) return `${digits(value)} s`;
  return size >= 1e-3 ? `${digits(1e3 * value)} ms` : `${digits(1e6 * value)} µs`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const names = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < names.length - 1) [value, place] = [value / 1000, place + 1];
  return `${digits(value, 3)} ${names[place]}`;
}

const trouble = document.getElementById("trouble");

/** Shows what went wrong above everything, or takes it away. */
export function tell(text) {
  trouble.hidden = !text;
  trouble.textContent = text ?? "";
}
