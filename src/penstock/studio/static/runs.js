// What is in the runs folder, and what is open: a run with its live state, a plan, a trace or a schedule.

import { ask, asked, bytes, digits, make, newestOnly, percent, seconds, tell } from "./dom.js";
import { watch } from "./live.js";
import { change, state } from "./state.js";
import { changes, whatIf } from "./whatif.js";
import { Timeline } from "../web/timeline.js";

export function runs(panel, catalogue) {
  const list = make("ul", { className: "library" });
  const title = make("h2", {});
  const now = make("div", {});
  const facts = make("div", {});
  const picture = make("div", { className: "picture" });
  const tries = make("div", {});
  panel.append(
    make("details", { open: true }, make("summary", {}, "Runs, plans and traces"), list),
    title, now, tries, facts, picture,
  );
  let timeline = null;
  let watching = new AbortController();
  let open = null;

  addEventListener("penstock-theme", () => timeline?.refresh());

  /** Shows a timeline that a run which trains has added, unless one is chosen. */
  function renewed() {
    if (!state.step && !state.what_if && !document.hidden) update();
  }

  async function entries() {
    try {
      const { folder, entries: found } = await ask("api/library");
      list.replaceChildren(...found.map(item));
      if (!found.length) list.append(make("li", { className: "muted" },
        `Nothing in ${folder}/ yet: penstock.pipeline(..., run="${folder}/NAME") records a run; plans and traces can be put there.`));
    } catch (error) {
      tell(error.message);
    }
  }

  function item(one) {
    const button = make("button", { data: { entry: one.name, kind: one.damage ? "damaged" : one.kind }, on: { click: () => choose(one.name) } }, one.name);
    const when = new Date(1000 * one.modified).toLocaleString();
    const what = one.damage ? `damaged ${one.kind}` : one.kind;
    return make("li", {}, button, make("span", { className: "muted" }, ` ${what}, ${when}`),
      one.damage ? make("span", { className: "damage" }, one.damage) : null);
  }

  function choose(name) {
    change({ run: name, step: "", what_if: "" });
    update();
  }

  const update = newestOnly(async () => {
    await entries();
    for (const button of list.querySelectorAll("[data-entry]")) button.setAttribute("aria-pressed", String(button.dataset.entry === state.run));
    if (!state.run) return;
    if (open !== state.run) follow();
    try {
      show(await ask("api/open", { name: state.run, step: state.step, what_if: state.what_if }));
      tell(null);
    } catch (error) {
      clear();
      title.replaceChildren(state.run);
      facts.replaceChildren(make("p", { className: "muted" }, error.message));
    }
  });

  const tryOut = newestOnly(async (text) => {
    change({ what_if: text });
    try {
      show(await ask("api/open", { name: state.run, step: state.step, what_if: text, picture: "no" }));
    } catch (error) {
      tries.querySelector(".outcome")?.replaceChildren(error.message);
    }
  });

  /** Watches the run if it is one; nothing is said if it is not. */
  function follow() {
    watching.abort();
    watching = new AbortController();
    open = state.run;
    now.replaceChildren();
    clear();
    const report = `report?${asked({ name: state.run })}`;
    title.replaceChildren(`${state.run} `, make("a", { href: report, target: "_blank", rel: "noopener", data: { report: state.run } }, "full report"));
    if (list.querySelector(`[data-entry="${CSS.escape(state.run)}"]`)?.dataset.kind === "run") {
      watch(now, state.run, watching.signal, renewed);
    }
  }

  function clear() {
    timeline?.destroy();
    timeline = null;
    tries.replaceChildren();
    facts.replaceChildren();
  }

  function show(found) {
    const focused = document.activeElement?.dataset?.key;
    tries.replaceChildren();
    const link = title.querySelector("[data-report]");
    if (link) {
      link.hidden = found.kind === "schedule";
      link.href = `report?${asked({ name: state.run, step: state.step })}`;
    }
    if (found.kind === "run") {
      const depth = found.cuts.length + 1;
      tries.append(whatIf(found.explanation, found.schedule, depth, state.what_if, catalogue.schedules, tryOut));
      if (focused) tries.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
      facts.replaceChildren(make("h2", {}, "What to change first"), changes(found.explanation), ...[steps(found.explanation)].filter(Boolean), ...notes(found));
    } else if (found.kind === "plan") facts.replaceChildren(plan(found), ...notes(found));
    else if (found.kind === "schedule") facts.replaceChildren(schedule(found), ...notes(found));
    else facts.replaceChildren(...notes(found));
    if (!found.timeline) return;
    if (timeline) timeline.setData(found.timeline);
    else timeline = new Timeline(picture, found.timeline, { wheel: "focused" });
  }

  function steps(explanation) {
    const numbers = Object.keys(explanation.steps);
    if (numbers.length < 2) return null;
    const choice = make("select", { aria: { label: "Step" } }, ...numbers.map((one) => make("option", { value: one }, `step ${one}: ${seconds(explanation.steps[one])}`)));
    choice.value = String(explanation.step);
    choice.addEventListener("change", () => {
      change({ step: choice.value });
      update();
    });
    return make("p", {}, "Shown: ", choice);
  }

  return { update, stop: () => { watching.abort(); open = null; } };
}

function notes(found) {
  return [found.note, ...(found.explanation?.notes ?? [])].filter(Boolean).map((text) => make("p", { className: "notes" }, text));
}

function plan(found) {
  const { choice, step_seconds: step, memory_bytes: memory } = found.plan;
  return table([
    ["schedule", "Schedule", choice.schedule],
    ["ranks", "Ranks", choice.ranks],
    ["replicas", "Replicas", choice.replicas],
    ["chunks", "Chunks a rank", choice.chunks],
    ["microbatches", "Microbatches", choice.microbatches],
    ["step_seconds", "A step takes", step, seconds],
    ["rows_per_second", "Rows per second", found.rows_per_second, digits],
    ["bubble", "Bubble", found.bubble, percent],
    ["memory_bytes", "Most memory of a rank", Math.max(...memory), bytes],
  ]);
}

function schedule(found) {
  return table([
    ["ranks", "Ranks", found.ranks],
    ["microbatches", "Microbatches", found.microbatches],
    ["span", "Span", found.span, digits],
    ["bubble", "Bubble", found.bubble, percent],
  ]);
}

function table(rows) {
  return make("table", { className: "facts" }, make("tbody", {}, ...rows.map(([key, name, value, text = String]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", { data: { fact: key, value } }, text(value))))));
}
