// Several schedules on one axis of time, their figures, the search's result beside them, and files of each.

import { ask, asked, digits, make, newestOnly, percent, tell } from "./dom.js";
import { change, question, state } from "./state.js";
import { Timeline } from "../web/timeline.js";

const COLUMNS = [
  ["bubble_rate", "Bubble", percent, (one) => one.bubble_rate, "The share of the span in which ranks do not compute"],
  ["span", "Span", digits, (one) => one.span, "The longest that a rank takes from its first forward to its end"],
  ["makespan", "Makespan", digits, (one) => one.makespan, "From the first start to the last end, over all ranks"],
  ["peak_activations", "Peak memory", digits, (one) => Math.max(...one.peak_activations), "In activations: 1 is one microbatch on all of a rank's stages"],
];
const KINDS = { csv: "CSV for torch", svg: "SVG", png: "PNG", perfetto: "Perfetto" };

export function play(panel) {
  const table = make("table", { className: "figures-table" });
  const refused = make("ul", { className: "notes" });
  const picture = make("div", { className: "picture" });
  const search = searching(() => update());
  const files = make("div", { className: "files" });
  panel.append(
    make("div", { className: "wide", tabIndex: 0 }, table),
    refused,
    search.row,
    picture,
    make("h2", {}, "Files"),
    files,
    make("p", { className: "notes" },
      "Costs are for one microbatch on one rank, divided among its chunks, as in penstock simulate --schedule a,b. " +
      "Bubble: the share of the span in which ranks do not compute. Peak memory: the most activations that a rank holds; " +
      "1 is one microbatch on all its stages. Makespan is from the first start to the last end; span leaves out how late a " +
      "rank starts, as papers on zero bubbles count."),
  );
  let timeline = null;
  let shown = null;

  const seek = newestOnly(async () => {
    const of = asked(question());
    const best = await search.find();
    if (best && state.searched && of === asked(question())) show(shown, best);
  });

  addEventListener("penstock-theme", () => timeline?.refresh());
  const update = newestOnly(async () => {
    try {
      const answer = state.schedules ? await ask("api/simulate", question()) : { schedules: [], not_allowed: [], timeline: null };
      tell(null);
      panel.classList.remove("stale");
      shown = answer;
      show(answer, null);
      if (state.searched) seek(); // takes seconds, for which no number waits
    } catch (error) {
      panel.classList.add("stale"); // these figures are of other numbers
      tell(error.message);
    }
  });

  function show(answer, best) {
    const rows = [...answer.schedules, ...(best?.schedules ?? [])];
    fill(table, rows, best);
    refused.replaceChildren(...answer.not_allowed.map((one) => make("li", {}, `${one.name} ${one.reason}`)));
    const bands = [...(answer.timeline?.bands ?? []), ...(best?.timeline.bands ?? [])];
    const data = { unit: "units", ops: (answer.timeline ?? best?.timeline)?.ops ?? [], bands };
    picture.hidden = !bands.length;
    if (!bands.length) return;
    if (timeline) timeline.setData(data);
    else timeline = new Timeline(picture, data, { most: 2400, wheel: "focused" });
    files.replaceChildren(...rows.map((one) => links(one.name)));
  }

  return { update };
}

function fill(table, rows, best) {
  const shortest = Math.min(...rows.filter((one) => one.fits).map((one) => one.span));
  table.replaceChildren(
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Schedule"), ...COLUMNS.map(([, head, , , title]) => make("th", { scope: "col", title }, head)))),
    make("tbody", {}, ...rows.map((one) =>
      make("tr", { data: { schedule: one.name } },
        make("th", { scope: "row" }, title(one, best)),
        ...COLUMNS.map(([name, , text, value]) =>
          make("td", { data: { figure: name, value: value(one) }, className: classes(name, one, shortest) },
            text(value(one)) + (name === "peak_activations" && !one.fits ? " over" : ""))),
      ))),
  );
}

function title(one, best) {
  if (one.name !== "search") return one.chunks > 1 ? `${one.name}, ${one.chunks} chunks` : one.name;
  const gap = best.gap <= 1e-6 ? "proven best" : `at most ${percent(best.gap)} above the best`;
  return `search: ${best.is_named ? `as ${best.is_named}, ` : ""}${gap}`;
}

function classes(name, one, shortest) {
  if (name === "peak_activations" && !one.fits) return "over";
  return name === "span" && one.fits && one.span <= shortest * (1 + 1e-9) ? "best" : "";
}

function links(name) {
  const given = { ...question(), schedule: name };
  if (name === "search") Object.assign(given, { placement: state.placement, seconds: state.searched });
  return make("p", { data: { files: name } }, make("b", {}, `${name} `),
    ...Object.entries(KINDS).flatMap(([kind, text]) => {
      const href = `export/${kind === "png" ? "svg" : kind}?${asked(given)}`;
      const link = make("a", { href, download: "", data: { kind } }, text);
      link.addEventListener("click", (event) => { event.preventDefault(); save(href, kind); });
      return [link, " "];
    }));
}

/** Saves what is at an address, or says why there is no such file. A PNG is drawn from the SVG. */
async function save(address, kind) {
  try {
    const response = await fetch(address, { headers: { "Penstock-Page": "yes" } });
    const name = /filename="(.*)"/.exec(response.headers.get("Content-Disposition"))?.[1];
    if (!name) throw new Error((await response.json()).error);
    const file = await response.blob();
    tell(null);
    if (kind === "png") offer(await drawn(file), name.replace(/svg$/, "png"));
    else offer(file, name);
  } catch (error) {
    tell(error.message);
  }
}

function offer(file, name) {
  const address = URL.createObjectURL(file);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** An SVG as a PNG, twice as large. */
async function drawn(file) {
  const image = new Image();
  const address = URL.createObjectURL(file);
  image.src = address;
  await image.decode();
  const canvas = make("canvas", { width: 2 * image.naturalWidth, height: 2 * image.naturalHeight });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** The button that searches, and its answer for the question as it is. */
function searching(changed) {
  const where = make("select", { aria: { label: "Placement" } },
    make("option", { value: "loop" }, "in a loop"), make("option", { value: "v" }, "on a V, 2 chunks"));
  where.value = state.placement;
  const box = make("input", { type: "checkbox", checked: Boolean(state.searched), id: "searched" });
  const status = make("span", { className: "muted", aria: { role: "status" } });
  const ticked = () => {
    change({ searched: box.checked ? "1" : "", placement: where.value });
    changed();
  };
  box.addEventListener("change", ticked);
  where.addEventListener("change", ticked);
  return {
    row: make("p", { className: "searching" },
      make("label", {}, box, " Search for a better schedule,"), " ", where, " ", status),
    async find() {
      status.textContent = "searching…";
      try {
        const found = await ask("api/search", { ...question(), schedules: "naive", placement: state.placement, seconds: state.searched });
        status.textContent = "";
        return found;
      } catch (error) {
        status.textContent = error.message;
        return null;
      }
    },
  };
}
