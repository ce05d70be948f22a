// What the theme leaves out for keyboards and screen readers, and its colors for the live schedule.

const dark = () => {
  const chosen = document.body.dataset.theme;
  return chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
};
const live = () => document.querySelector(".live-schedule iframe")?.contentWindow.postMessage({ theme: dark() ? "dark" : "light" }, "*");

addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("pre, .table-wrapper")) if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  for (const head of document.querySelectorAll("article :is(h1, h2, h3)")) {
    for (const text of [...head.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && /\w\.\w/.test(node.data))) {
      text.replaceWith(...text.data.split(/(?<=\w\.)(?=\w)/).flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part])));
    }
  }
  for (const head of document.querySelectorAll("th")) if (!head.textContent.trim()) head.replaceWith(document.createElement("td"));
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  new MutationObserver(live).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
  live(); // if it was first; it answers with its height
});
addEventListener("message", ({ data }) => {
  if (data === "live-schedule") live();
  if (data?.liveSchedule) document.querySelector(".live-schedule iframe").style.height = `${data.liveSchedule}px`;
});
