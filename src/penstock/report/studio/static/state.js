// What is shown, as the part of the address after #: a link reproduces it.

/** The numbers and names of a question, as the server takes them, with their usual values. */
export const QUESTION = {
  schedules: "gpipe,1f1b,zb-h1",
  ranks: "4",
  microbatches: "8",
  chunks: "",
  forward: "1",
  backward_input: "1",
  backward_weight: "1",
  comm: "0",
  head: "0",
  memory_limit: "",
};

const VIEW = {
  view: "play",
  searched: "", // seconds, once a search is part of what is shown
  placement: "loop",
  left: "naive",
  right: "1f1b",
  slot: "0",
  run: "",
  step: "",
  what_if: "",
  compare: "", // names of runs with | between them
};

const USUAL = { ...QUESTION, ...VIEW };

export const state = { ...USUAL };

/** Reads the address. Names that it does not know are left out. */
export function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(USUAL)) state[name] = given.get(name) ?? USUAL[name];
}

/** Changes what is shown, and the address with it. */
export function change(changes) {
  for (const [name, value] of Object.entries(changes)) state[name] = String(value ?? "");
  const kept = Object.entries(state).filter(([name, value]) => value !== USUAL[name]);
  const text = new URLSearchParams(kept).toString().replaceAll("%2C", ",");
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}

/** The question that the server is asked. */
export function question(schedules = state.schedules) {
  return { ...Object.fromEntries(Object.keys(QUESTION).map((name) => [name, state[name]])), schedules };
}
