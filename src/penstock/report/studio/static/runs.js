// What is in the runs folder, and what is open: a run with its live state, a plan, a trace or a schedule.

import { compare, MOST } from "./compare.js";
import { ask, asked, bytes, digits, make, newestOnly, percent, seconds, tell } from "./dom.js";
import { watch } from "./live.js";
import { change, state } from "./state.js";
import { changes, whatIf } from "./whatif.js";
import { Timeline } from "../web/timeline.js";

export function runs(panel, catalog) {
  const list = make("div", { className: "library" });
  const compared = make("div", { className: "compared" });
  const title = make("h2", {});
  const now = make("div", {});
  const facts = make("div", {});
  const picture = make("div", { className: "picture" });
  const tries = make("div", {});
  panel.append(
    make("details", { open: true }, make("summary", {}, "Runs, plans and traces"), list),
    compared, title, now, tries, facts, picture,
  );
  let comparison = null;
  let timeline = null;
  let watching = new AbortController();
  let open = null;

  addEventListener("penstock-theme", () => [timeline, comparison].forEach((one) => one?.refresh()));

  /** Shows a timeline that a run which trains has added, unless one is chosen. */
  function renewed() {
    if (!state.step && !state.what_if && !document.hidden) update();
  }

  async function entries() {
    try {
      const { folder, entries: found } = await ask("api/library");
      const focused = document.activeElement?.dataset.compare;
      list.replaceChildren(...(found.length ? [catalogOf(found, choose, mark)] : [make("p", { className: "muted" },
        `Nothing in ${folder}/ yet: penstock.pipeline(..., run_dir="${folder}/NAME") records a run; plans and traces can be put there.`)]));
      if (focused) list.querySelector(`[data-compare="${CSS.escape(focused)}"]`)?.focus();
      return found;
    } catch (error) {
      tell(error.message);
      return [];
    }
  }

  /** Takes a run into the comparison, or out of it. */
  function mark(name, wanted) {
    const names = marked().filter((one) => one !== name);
    tell(wanted && names.length >= MOST ? `${MOST} runs are compared at most: ${names[0]} is left out` : null);
    change({ compare: [...names, ...(wanted ? [name] : [])].slice(-MOST).join("|") });
    update();
  }

  async function lay(found) {
    comparison?.destroy();
    watching.abort();
    open = null;
    clear();
    for (const one of [title, now]) one.replaceChildren();
    try {
      const there = marked().map((name) => found.find((one) => one.name === name)).filter(Boolean);
      if (there.length < 2) throw new Error("Fewer than two of these runs are in the folder: choose others");
      comparison = await compare(compared, there);
    } catch (error) {
      compared.replaceChildren();
      tell(error.message);
    }
  }

  function choose(name) {
    change({ run: name, step: "", what_if: "", compare: "" });
    update();
  }

  const update = newestOnly(async () => {
    const found = await entries();
    if (marked().length > 1) return lay(found);
    comparison?.destroy();
    comparison = null;
    compared.replaceChildren();
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

  /** Remembers a what-if at once, so that an answer to an older one does not take it back, and asks what it brings. */
  function tryOut(text) {
    change({ what_if: text });
    answer(text);
  }

  const answer = newestOnly(async (text) => {
    try {
      show(await ask("api/open", { name: state.run, step: state.step, what_if: text }));
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
      tries.append(whatIf(found.explanation, found.schedule, found.depth, state.what_if, catalog.schedules, tryOut));
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

const COLUMNS = [
  ["Name", (one) => one.name],
  ["Kind", (one) => (one.damage ? `damaged ${one.kind}` : one.kind)],
  ["Model", (one) => one.summary?.settings.model],
  ["Schedule", (one) => one.summary?.settings.schedule],
  ["Ranks", (one) => one.summary?.settings.ranks, digits],
  ["Microbatches", (one) => one.summary?.settings.microbatches, digits],
  ["Step time", (one) => one.summary?.progress?.seconds, seconds],
  ["Loss", (one) => one.summary?.progress?.loss, (value) => (typeof value === "string" ? value : digits(value))],
  ["Bubble", (one) => one.summary?.progress?.bubble, percent],
  ["State", (one) => one.summary?.state],
  ["When", (one) => one.modified, (value) => new Date(1000 * value).toLocaleString()],
];
const marked = () => state.compare.split("|").filter(Boolean);
let sorted = ["When", -1]; // newest first, until another heading is clicked
let wanted = "";

/** What can be opened, a row each, sorted by the column whose heading is clicked, and of those only what the filter names. Runs can be marked to be compared. */
function catalogOf(entries, choose, mark) {
  const body = make("tbody");
  const heads = COLUMNS.map(([name]) => make("th", { scope: "col" }, make("button", { on: { click: () => {
    sorted = [name, sorted[0] === name ? -sorted[1] : 1];
    fill();
  } } }, name)));
  const filter = make("input", { type: "search", value: wanted, placeholder: "filter", aria: { label: "Filter runs, plans and traces" } });
  filter.addEventListener("input", () => {
    wanted = filter.value;
    fill();
  });
  const box = (one) => {
    if (one.kind !== "run" || one.damage) return null;
    return make("input", { type: "checkbox", checked: marked().includes(one.name), aria: { label: `Compare ${one.name}` }, data: { compare: one.name }, on: { change: (event) => mark(one.name, event.target.checked) } });
  };
  const row = (one) => make("tr", { data: { state: one.summary?.state ?? "" } }, make("td", {}, box(one)), ...COLUMNS.map(([name, value, text = (found) => found ?? ""]) => {
    if (name !== "Name") return make("td", {}, value(one) === undefined || value(one) === null ? "" : text(value(one)));
    const kind = one.damage ? "damaged" : one.kind;
    const button = make("button", { data: { entry: one.name, kind }, on: { click: () => choose(one.name) } }, one.name);
    button.setAttribute("aria-pressed", String(one.name === state.run));
    return make("th", { scope: "row" }, button, one.damage ? make("span", { className: "damage" }, one.damage) : null);
  }));
  const fill = () => {
    const [name, way] = sorted;
    const value = COLUMNS.find(([one]) => one === name)[1];
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = entries.filter((one) => words.every((word) => COLUMNS.some(([, of]) => String(of(one) ?? "").toLowerCase().includes(word))));
    const given = shown.filter((one) => value(one) !== undefined && value(one) !== null).sort((a, b) => way * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
    body.replaceChildren(...[...given, ...shown.filter((one) => !given.includes(one))].map(row));
    heads.forEach((head, place) => head.setAttribute("aria-sort", COLUMNS[place][0] !== name ? "none" : way > 0 ? "ascending" : "descending"));
  };
  fill();
  return make("div", { className: "wide" }, filter, make("table", { className: "entries" }, make("thead", {}, make("tr", {}, make("td", { className: "muted" }, "compare"), ...heads)), body));
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
