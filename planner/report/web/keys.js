// The keyboard: everything that the pointer can do.

const KEY_HELP = [
  [["+", "−"], "zoom in and out at the cursor"],
  [["←", "→"], "pan"],
  [["Home"], "the whole iteration"],
  [["Shift ←", "Shift →"], "cursor to the op before and after; it says what is there"],
  [["↑", "↓"], "in a chart: the lane or tensor above and below"],
  [["Enter"], "in a chart or the table: highlight the tensor, or no longer"],
  [["[", "]"], "lower and taller rows in the map"],
  [["/"], "search tensors"],
  [["Escape"], "end the search, the cursor, the highlight"],
  [["Tab"], "to the next chart, button or table"],
  [["t"], "dark or light"],
  [["?"], "these keys"],
];

function makeKeys(model, view, map) {
  const rows = KEY_HELP.flatMap(([keys, text]) => [
    node("dt", {}, ...keys.flatMap((key, i) => [i ? " " : "", node("kbd", {}, key)])),
    node("dd", {}, text),
  ]);
  byId("key-list").replaceChildren(...rows);
  const search = byId("search");
  search.addEventListener("input", () => view.search(search.value));
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("zoom-in").addEventListener("click", () => view.zoom(0.5));
  byId("zoom-out").addEventListener("click", () => view.zoom(2));
  byId("reset").addEventListener("click", view.reset);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    const typing = event.target.closest?.("input, select, textarea");
    if (typing && event.key !== "Escape") return;
    if (onKey(event, model, view, map)) event.preventDefault();
  });
}

/** Whether the key was one of ours. */
function onKey(event, model, view, map) {
  const focused = charts.find(({ element }) => element === document.activeElement);
  const actions = {
    "+": () => view.zoom(0.5),
    "=": () => view.zoom(0.5),
    "-": () => view.zoom(2),
    ArrowLeft: () => (event.shiftKey ? stepCursor(model, view, focused, -1) : view.pan(-0.2)),
    ArrowRight: () => (event.shiftKey ? stepCursor(model, view, focused, 1) : view.pan(0.2)),
    Home: view.reset,
    t: () => view.toggleTheme(),
    "/": () => byId("search").focus(),
    "?": () => byId("keys").showModal(),
    "[": () => map.taller(-1),
    "]": () => map.taller(1),
    Escape: () => escape(view),
  };
  const inChart = {
    ArrowUp: () => stepLane(view, focused, -1),
    ArrowDown: () => stepLane(view, focused, 1),
    Enter: () => focused.click?.(view.cursor ?? view.centre(), focused.y ?? 0),
  };
  const action = actions[event.key] ?? (focused ? inChart[event.key] : undefined);
  action?.();
  return action !== undefined;
}

function escape(view) {
  const search = byId("search");
  if (document.activeElement === search || search.value) {
    search.value = "";
    view.search("");
    search.blur();
  } else if (view.cursor !== null) {
    hideTip();
    view.point(null);
  } else if (view.tensor >= 0) {
    view.choose(view.tensor);
  }
}

/** To the begin of the next op (or stall) that is at least three pixels away; the view follows. */
function stepCursor(model, view, focused, direction) {
  const chart = focused ?? charts[0];
  const visible = view.max - view.min;
  const least = (3 * visible) / chart.u.over.clientWidth;
  const from = view.cursor ?? (direction > 0 ? view.min - least : view.max + least);
  let to = from + direction * least;
  if (direction > 0) {
    const op = countUpTo(model.opStart, to - visible * 1e-9);
    to = op < model.ops ? model.opStart[op] : model.length;
  } else {
    const op = countUpTo(model.opStart, to + visible * 1e-9) - 1;
    to = op >= 0 ? model.opStart[op] : 0;
  }
  to = Math.min(Math.max(to, 0), model.length * (1 - 1e-12));
  if (to < view.min || to > view.max) view.show(to - visible / 2, to + visible / 2);
  view.point(to);
  readOut(chart);
}

function stepLane(view, chart, step) {
  if (view.cursor === null) view.point(view.centre());
  chart.y = chart.keyY ? chart.keyY(step, chart.y ?? 0) : chart.y;
  readOut(chart);
}
