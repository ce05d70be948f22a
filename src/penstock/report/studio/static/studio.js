// The page: which view is shown, and what is asked again after a change.

import { controls } from "./controls.js";
import { ask, enter, tell } from "./dom.js";
import { play } from "./play.js";
import { runs } from "./runs.js";
import { change, read, state } from "./state.js";
import { walk } from "./walk.js";

const VIEWS = ["play", "walk", "runs"];
const byId = (id) => document.getElementById(id);

async function begin() {
  await enter();
  read();
  change({});
  const catalog = await ask("api/catalog");
  const views = {
    play: play(byId("play")),
    walk: walk(byId("walk"), catalog),
    runs: runs(byId("runs"), catalog),
  };
  const panel = controls(byId("controls"), catalog, () => views[state.view].update());

  function show(view) {
    if (state.view === "runs" && view !== "runs") views.runs.stop();
    change({ view: VIEWS.includes(view) ? view : "play" });
    for (const one of VIEWS) {
      byId(one).hidden = one !== state.view;
      byId(`tab-${one}`).setAttribute("aria-selected", String(one === state.view));
      byId(`tab-${one}`).tabIndex = one === state.view ? 0 : -1; // the arrow keys reach the others
    }
    byId("controls").hidden = state.view === "runs";
    byId("controls").dataset.view = state.view;
    tell(null);
    views[state.view].update();
  }

  for (const tab of document.querySelectorAll("[data-view][role=tab]")) tab.addEventListener("click", () => show(tab.dataset.view));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const at = VIEWS.indexOf(state.view);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: VIEWS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(VIEWS.at(to % VIEWS.length));
    byId(`tab-${state.view}`).focus();
  });
  addEventListener("hashchange", async () => {
    await enter();
    read();
    panel.refresh();
    show(state.view);
  });
  byId("copy").addEventListener("click", copy);
  byId("theme").addEventListener("click", turn);
  show(state.view);
  document.documentElement.dataset.ready = "yes";
}

async function copy() {
  try {
    await navigator.clipboard.writeText(location.href);
    byId("copy").textContent = "Copied";
  } catch {
    prompt("The link that opens this view:", location.href); // the clipboard needs https or localhost
  }
  setTimeout(() => { byId("copy").textContent = "Copy link"; }, 1500);
}

const root = document.documentElement;

function turn() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  stored("setItem", root.dataset.theme);
  dispatchEvent(new Event("penstock-theme"));
}

/** Keeps or reads the theme, where the browser allows it. */
function stored(act, ...value) {
  try {
    return localStorage[act]("penstock-theme", ...value);
  } catch {
    return null;
  }
}

const remembered = stored("getItem");
if (remembered) root.dataset.theme = remembered;
begin().catch((error) => tell(error.message));
