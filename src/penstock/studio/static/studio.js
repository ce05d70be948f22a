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
    }
    byId("controls").hidden = state.view === "runs";
    byId("controls").dataset.view = state.view;
    tell(null);
    views[state.view].update();
  }

  for (const tab of document.querySelectorAll("[data-view][role=tab]")) tab.addEventListener("click", () => show(tab.dataset.view));
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

function turn() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  dispatchEvent(new Event("penstock-theme"));
}

begin().catch((error) => tell(error.message));
