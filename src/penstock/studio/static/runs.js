// What is in the runs folder, and what is open: a run with its live state, a plan, a trace or a schedule.

import { ask, digits, make, newestOnly, percent, seconds, tell } from "./dom.js";
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
    const text = one.kind === "run" ? `${one.name}` : one.name;
    const button = make("button", { data: { entry: one.name }, on: { click: () => choose(one.name) } }, text);
    const when = new Date(1000 * one.modified).toLocaleString();
    return make("li", {}, button, make("span", { className: "muted" }, ` ${one.kind}, ${when}`));
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
      facts.replaceChildren(make("p", { className: "muted" }, error.message));
    }
  });

  const tryOut = newestOnly(async (text) => {
    change({ what_if: text });
    try {
      show(await ask("api/open", { name: state.run, step: state.step, what_if: text }));
      tell(null);
    } catch (error) {
      tell(error.message);
    }
  });

  /** Watches the run if it is one; nothing is said if it is not. */
  function follow() {
    watching.abort();
    watching = new AbortController();
    open = state.run;
    now.replaceChildren();
    clear();
    title.textContent = state.run;
    if (list.querySelector(`[data-entry="${CSS.escape(state.run)}"]`)?.parentElement.textContent.includes(" run, ")) {
      watch(now, state.run, watching.signal);
    }
  }

  function clear() {
    timeline?.destroy();
    timeline = null;
    tries.replaceChildren();
    facts.replaceChildren();
  }

  function show(found) {
    const focused = document.activeElement?.dataset?.cut;
    tries.replaceChildren();
    if (found.kind === "run") {
      const depth = found.cuts.length + 1;
      tries.append(whatIf(found.explanation, depth, state.what_if, catalogue.schedules, tryOut));
      if (focused) tries.querySelector(`[data-cut="${CSS.escape(focused)}"]`)?.focus();
      facts.replaceChildren(make("h2", {}, "What to change first"), changes(found.explanation), steps(found.explanation), ...notes(found));
    } else if (found.kind === "plan") facts.replaceChildren(plan(found), ...notes(found));
    else facts.replaceChildren(schedule(found), ...notes(found));
    if (!found.timeline) return;
    if (timeline) timeline.setData(found.timeline);
    else timeline = new Timeline(picture, found.timeline, { wheel: "focused" });
  }

  function steps(explanation) {
    const numbers = Object.keys(explanation.steps);
    if (numbers.length < 2) return null ?? make("span", {});
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
    ["Schedule", choice.schedule],
    ["Ranks", choice.ranks],
    ["Replicas", choice.replicas],
    ["Chunks a rank", choice.chunks],
    ["Microbatches", choice.microbatches],
    ["A step takes", seconds(step)],
    ["Rows per second", digits(found.rows_per_second)],
    ["Bubble", percent(found.bubble)],
    ["Most memory of a rank", `${digits(Math.max(...memory) / 1e9)} GB`],
  ]);
}

function schedule(found) {
  return table([["Ranks", found.ranks], ["Microbatches", found.microbatches], ["Span", digits(found.span)], ["Bubble", percent(found.bubble)]]);
}

function table(rows) {
  return make("table", { className: "facts" }, make("tbody", {}, ...rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, String(value))))));
}
