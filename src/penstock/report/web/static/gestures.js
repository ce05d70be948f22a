// Mouse, touch and keys of a timeline: they only call its methods.

const STILL = 4; // pixels that a click may move

/** Wires up an element. `view` has range, pan(pixels), zoom(factor, x), scroll(pixels), hover(x, y), click(x, y), ... */
export function listen(view, element, stop) {
  const fingers = new Map();
  let moved = 0;
  let apart = 0;
  const on = (name, what, options = {}) => element.addEventListener(name, what, { signal: stop, ...options });
  const place = (event) => {
    const box = element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  on("pointerdown", (event) => {
    if (event.button > 0) return;
    fingers.set(event.pointerId, place(event));
    moved = 0;
    apart = spread(fingers);
    element.setPointerCapture(event.pointerId);
  });
  on("pointermove", (event) => {
    const [x, y] = place(event);
    const last = fingers.get(event.pointerId);
    if (!last) {
      view.hover(x, y);
      return;
    }
    fingers.set(event.pointerId, [x, y]);
    moved += Math.abs(x - last[0]) + Math.abs(y - last[1]);
    if (fingers.size === 2) {
      const now = spread(fingers);
      const center = [...fingers.values()].reduce((sum, [at]) => sum + at / 2, 0);
      if (apart > 0 && now > 0) view.zoom(apart / now, center);
      apart = now;
      view.pan(last[0] - x > 0 ? (last[0] - x) / 2 : -(x - last[0]) / 2);
    } else if (moved > STILL) {
      view.pan(last[0] - x);
      if (event.pointerType === "mouse") view.scroll(last[1] - y);
    }
  });
  const lift = (event) => {
    const was = fingers.delete(event.pointerId);
    if (was && event.type === "pointerup" && moved <= STILL) view.click(...place(event));
  };
  on("pointerup", lift);
  on("pointercancel", lift);
  on("pointerleave", () => view.leave());
  on("dblclick", (event) => view.zoom(0.5, place(event)[0]));
  on("wheel", (event) => wheel(view, element, event, place(event)[0]), { passive: false });
  on("keydown", (event) => {
    if (event.altKey || event.metaKey || event.ctrlKey) return;
    if (key(view, event)) event.preventDefault();
  });
}

function spread(fingers) {
  if (fingers.size !== 2) return 0;
  const [[one], [two]] = fingers.values();
  return Math.max(20, Math.abs(one - two));
}

/** Up and down zoom, sideways pans. Whoever scrolls past on the way down the page is let through. */
function wheel(view, element, event, x) {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
  if (sideways) {
    view.pan(event.deltaX || event.deltaY);
  } else {
    const chosen = event.ctrlKey || event.metaKey || view.options.wheel === "always" || element.matches(":focus");
    if (!chosen || (event.deltaY > 0 && view.whole)) return;
    view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 240), x);
  }
  event.preventDefault();
}

function key(view, event) {
  const quarter = view.width / 8;
  const walking = view.selected !== null;
  const keys = {
    ArrowLeft: () => view.pan(-quarter),
    ArrowRight: () => view.pan(quarter),
    ArrowUp: () => (walking ? view.walkRank(-1) : view.scroll(-60)),
    ArrowDown: () => (walking ? view.walkRank(1) : view.scroll(60)),
    "+": () => view.zoom(0.7),
    "=": () => view.zoom(0.7),
    "-": () => view.zoom(1 / 0.7),
    0: () => view.fit(),
    Home: () => view.fit(),
    Enter: () => view.walk(walking ? 1 : 0),
  };
  if (walking) {
    keys.Tab = () => view.walk(event.shiftKey ? -1 : 1);
    keys.Escape = () => view.select(null);
  }
  const action = keys[event.key];
  return action === undefined ? false : action() !== false;
}
