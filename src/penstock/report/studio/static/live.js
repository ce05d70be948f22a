// A run while it lives: asked once a second, only for what is new.

import { chart } from "./chart.js";
import { ask, bytes, digits, make, percent, seconds } from "./dom.js";

const EVERY = 1000; // milliseconds
const MOST = 20000; // steps that are kept

/** Watches a run in an element until `signal` is aborted. `renewed` is called when a timeline has been added. */
export function watch(element, name, signal, renewed) {
  const head = make("p", { className: "muted" });
  const figures = make("dl", { className: "figures" });
  const charts = make("div", { className: "charts" });
  const table = make("table", { className: "ranks" });
  element.replaceChildren(make("h2", {}, "Now"), head, figures, make("div", { className: "wide", tabIndex: 0 }, table), charts);
  let place = 0;
  let id = null;
  let steps = [];
  let held = []; // [step, bytes of the process that holds most] while it was watched
  let recorded = null;

  async function look() {
    if (document.hidden && id !== null) return;
    try {
      const now = await ask("api/live", { name, place }, signal);
      if (id !== null && (now.id !== id || now.place < place)) { // another run began here, or this one was resumed
        [id, place, steps, held] = [null, 0, [], []];
        return look();
      }
      if (id === null) recorded = now.recorded;
      id = now.id;
      place = now.place;
      const first = now.steps[0]?.step ?? Infinity; // a run that is resumed writes steps again
      steps = [...steps.filter((one) => one.step < first), ...now.steps].slice(-MOST);
      const most = Math.max(...now.states.map((one) => one.device_bytes ?? one.rss_bytes));
      const step = now.progress?.step ?? 0;
      if (now.states.length && step > (held[held.length - 1]?.[0] ?? -1)) held = [...held, [step, most]].slice(-MOST);
      show(now);
      if (now.recorded !== recorded) renewed();
      recorded = now.recorded;
    } catch (error) {
      if (!signal.aborted) head.textContent = error.message;
    }
  }

  function show(now) {
    const known = now.progress;
    const alive = now.states.some((one) => ["computes", "waits", "between steps"].includes(one.health));
    head.textContent = now.headline;
    const of = known?.total_steps ? ` of ${known.total_steps}` : "";
    figures.replaceChildren(
      figure("Steps", known ? `${known.step}${of}` : "none yet", alive ? "running" : "not running", "steps"),
      figure("Loss", known ? digits(Number(known.loss ?? NaN)) : "–", "", "loss"),
      figure("Rows per second", digits(known?.rows_per_second), known?.seconds ? `step time ${seconds(known.seconds)}` : "", "speed"),
      bubble(now),
      figure("Time left", alive ? seconds(known?.left_seconds) : "–", "", "left"),
    );
    ranks(table, now);
    charts.replaceChildren(
      chart("Loss", steps.map((one) => [one.step, one.loss === null ? NaN : Number(one.loss)]), digits),
      chart("In Pipeline.step (s)", steps.map((one) => [one.step, one.seconds]), seconds),
      ...(held.length > 1 ? [chart("Peak process memory", held, bytes)] : []),
    );
  }

  look();
  const timer = setInterval(look, EVERY);
  signal.addEventListener("abort", () => clearInterval(timer));
}

/** A pipeline in one process has nobody to wait for, unless it has several devices. */
function bubble(now) {
  const known = now.progress?.bubble ?? null;
  if (now.alone && (now.ranks === 1 || known === null)) return figure("Bubble", "–", "one process: nothing waits for another", "bubble");
  return figure("Bubble", percent(known), "of the last step that was timed", "bubble");
}

function figure(name, value, of, key) {
  return make("div", {}, make("dt", {}, name), make("dd", { className: "value", data: { live: key } }, value), make("dd", { className: "of" }, of));
}

function ranks(table, now) {
  table.replaceChildren(
    make("thead", {}, make("tr", {}, ...["Rank", "Step", "Activity", "Duration", "Memory", "Last heartbeat"].map((text) => make("th", { scope: "col", className: text === "Activity" ? "left" : "" }, text)))),
    make("tbody", {}, ...now.states.map((one) =>
      make("tr", { data: { rank: one.number }, className: ["failed", "gone", "silent"].includes(one.health) ? "over" : "" },
        make("th", { scope: "row" }, one.ranks.length > 1 ? `${one.ranks[0]} to ${one.ranks[one.ranks.length - 1]}` : String(one.number)),
        make("td", {}, one.step === null ? "–" : String(one.step)),
        make("td", { className: "left does" }, one.doing),
        make("td", {}, ["computes", "waits"].includes(one.health) ? seconds(one.action_seconds) : "–"),
        make("td", {}, one.device_bytes === null ? bytes(one.rss_bytes) : bytes(one.device_bytes)),
        make("td", {}, one.health === "ended" ? "–" : `${seconds(Math.round(one.silent_seconds * 10) / 10)} ago`)))),
  );
}
