// What if: stages as a bar whose cuts can be moved, stragglers that can be taken away, another schedule.

import { make, percent, seconds } from "./dom.js";

const STEP = 0.05; // of a stage, with the arrow keys
const MOST = 0.95;

/**
 * The parts of a what-if as `penstock explain --what-if` takes them: cuts moved by a share (above 0: the stage after
 * the cut begins later, by that share of its work; below 0: earlier, by a share of the stage before), and others.
 */
export function written(moved, others) {
  const cuts = Object.entries(moved).filter(([, share]) => share).map(([cut, share]) => `cut=${cut}:${share.toFixed(2)}`);
  return [...cuts, ...others].join(",");
}

/** What `written` wrote. */
export function parsed(text) {
  const parts = text.split(",").filter(Boolean);
  const cuts = parts.map((part) => part.match(/^cut=(\d+):(-?[\d.]+)$/)).filter(Boolean);
  return {
    moved: Object.fromEntries(cuts.map(([, cut, share]) => [cut, Number(share)])),
    others: parts.filter((part) => !/^cut=\d+:/.test(part)),
  };
}

/** The panel for an explanation of a run whose own schedule has that name. `tried(text)` is called with each new what-if. */
export function whatIf(explanation, own, depth, text, schedules, tried) {
  const { moved, others } = parsed(text);
  const said = () => tried(written(moved, [...boxes.filter((box) => box.checked).map((box) => box.value), ...(other.value ? [`schedule=${other.value}`] : [])]));
  const stages = explanation.stages.slice(0, depth).map((one) => one.seconds);
  const bar = make("div", { className: "stages", aria: { role: "group", label: "Stage durations" } });
  bar.style.minWidth = `${4.2 * stages.length}rem`;
  const ranks = Array.from({ length: explanation.ranks }, (_, rank) => [`rank=${rank}`, `rank ${rank} is not slow`]);
  const boxes = [["stragglers=none", "no stragglers"], ["microbatches=equal", "equal microbatches"], ["cut=even", "balanced stages"], ...ranks.slice(0, 16)]
    .map(([value]) => make("input", { type: "checkbox", value, data: { key: value }, checked: others.includes(value), on: { change: said } }));
  const names = Object.fromEntries([["stragglers=none", "no stragglers"], ["microbatches=equal", "equal microbatches"], ["cut=even", "balanced stages"], ...ranks]);
  const other = make("select", { data: { key: "schedule" }, aria: { label: "Another schedule" }, on: { change: said } }, make("option", { value: "" }, `${own}, its own`),
    ...schedules.filter((one) => one.comparable && one.name !== own).map((one) => make("option", { value: one.name }, one.name)));
  other.value = others.find((part) => part.startsWith("schedule="))?.slice("schedule=".length) ?? "";
  const back = make("button", { on: { click: () => tried("") } }, "Reset");
  draw();
  return make("div", { className: "what-if" }, make("h2", {}, "What if"),
    make("p", { className: "notes" }, "Drag a cut between two stages, or move it with the arrow keys; the gain is simulated on the replay of this step."),
    make("div", { className: "wide", tabIndex: 0 }, bar), make("div", { className: "chips" }, ...boxes.map((box) => make("label", {}, box, ` ${names[box.value]}`)), make("label", {}, "schedule ", other), back),
    outcome(explanation));

  function taken() {
    const now = [...stages];
    for (const [cut, share] of Object.entries(moved)) {
      const amount = share > 0 ? share * now[cut] : share * now[cut - 1];
      now[cut] -= amount;
      now[cut - 1] += amount;
    }
    return now;
  }

  function draw() {
    const now = taken();
    bar.replaceChildren(...now.flatMap((value, stage) => {
      const box = make("div", { className: "stage", data: { stage, seconds: value }, title: `stage ${stage}: ${seconds(value)}` },
        make("b", {}, now.length > 6 ? String(stage) : `stage ${stage}`), make("span", {}, seconds(value)));
      box.style.flexGrow = String(value / (now.reduce((one, two) => one + two, 0) || 1));
      return stage ? [handle(stage), box] : [box];
    }));
  }

  function handle(cut) {
    const one = make("button", { className: "cut", data: { cut, key: `cut ${cut}` }, title: `The cut before stage ${cut}` });
    one.setAttribute("role", "slider");
    one.setAttribute("aria-label", `The cut before stage ${cut}`);
    one.setAttribute("aria-valuemin", "-95");
    one.setAttribute("aria-valuemax", "95");
    const percent = Math.round(100 * (moved[cut] ?? 0));
    one.setAttribute("aria-valuenow", String(percent));
    one.setAttribute("aria-valuetext", `${Math.abs(percent)}% of stage ${percent < 0 ? cut - 1 : cut} moved to stage ${percent < 0 ? cut : cut - 1}`);
    one.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -STEP, ArrowRight: STEP }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      moved[cut] = bounded((moved[cut] ?? 0) + by);
      said();
    });
    one.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      one.focus();
      const whole = bar.getBoundingClientRect().width;
      const total = stages.reduce((first, second) => first + second, 0);
      const start = event.clientX;
      const before = moved[cut] ?? 0;
      const follow = (move) => {
        const work = ((move.clientX - start) / whole) * total;
        moved[cut] = bounded(before + (work > 0 ? work / stages[cut] : work / stages[cut - 1]));
        said();
      };
      const stop = new AbortController();
      addEventListener("pointermove", follow, { signal: stop.signal });
      addEventListener("pointerup", () => stop.abort(), { signal: stop.signal });
      addEventListener("pointercancel", () => stop.abort(), { signal: stop.signal });
    });
    return one;
  }
}

function bounded(share) {
  return Math.round(Math.min(MOST, Math.max(-MOST, share)) * 100) / 100;
}

function outcome(explanation) {
  const [change] = explanation.what_ifs;
  if (!change) return make("p", { className: "outcome", data: { seconds: explanation.step_seconds } }, `The step takes ${seconds(explanation.step_seconds)}.`);
  const note = change.note ? ` (${change.note})` : "";
  return make("p", { className: "outcome", aria: { live: "polite" }, data: { seconds: change.step_seconds, gain: change.gain } },
    `The step would take ${seconds(change.step_seconds)} instead of ${seconds(explanation.step_seconds)}: ${change.claim}${note}.`);
}

/** What to change first, as `penstock explain` lists it. */
export function changes(explanation) {
  if (!explanation.changes.length) return make("p", {}, explanation.nothing);
  return make("ol", { className: "changes" }, ...explanation.changes.map((one) =>
    make("li", {}, `${one.claim} ${one.text}`, one.note ? make("span", { className: "muted" }, ` (${one.note})`) : null)));
}
