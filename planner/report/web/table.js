// The table of all tensors. Only the rows in sight exist, so 50,000 of them are no trouble.

const ROW = 26; // CSS pixels; page.css gives cells the same height
const FEW = 14; // so many rows need no scrolling of their own

function tableColumns(model) {
  const numbers = (head, key, show) => ({ head, value: (t) => model[key][t], show });
  const orNone = (show) => (value) => (value > 0 ? show(value) : "");
  return [
    { head: "Name", text: true, value: (t) => model.names[t] },
    { head: "Kind", text: true, value: (t) => model.kindOf(t) },
    numbers("Size", "tensor_bytes", formatBytes),
    numbers("Accesses", "tensor_accesses", formatCount),
    numbers("Longest gap", "tensor_longest_gap", orNone((us) => formatUs(us))),
    ...(model.hasPlan
      ? [
          { head: "Moved", value: (t) => model.tensor_moved_out[t] + model.tensor_moved_in[t], show: orNone(formatBytes) },
          numbers("Stall caused", "tensor_stall", orNone((us) => formatUs(us))),
        ]
      : []),
  ];
}

function makeTable(model, view) {
  const columns = tableColumns(model);
  const state = { by: 2, down: true, order: [], at: 0 };
  const scroller = byId("table-scroll");
  const body = node("tbody");
  const heads = columns.map((column, index) => headCell(column, () => sortBy(index)));
  byId("tensor-table").replaceChildren(node("thead", {}, node("tr", {}, ...heads)), body);

  const draw = () => drawRows(model, view, columns, state, scroller, body);
  function sortBy(index) {
    state.down = state.by === index ? !state.down : !columns[index].text;
    state.by = index;
    again();
  }
  function again() {
    const { value, text } = columns[state.by];
    const sign = state.down ? -1 : 1;
    const all = Array.from(model.names.keys());
    const kept = view.query ? all.filter((t) => model.searchText[t].includes(view.query)) : all;
    const compare = text ? (a, b) => NAMES.compare(value(a), value(b)) : (a, b) => value(a) - value(b);
    state.order = kept.sort((a, b) => sign * compare(a, b) || a - b);
    heads.forEach((head, i) =>
      head.setAttribute("aria-sort", i !== state.by ? "none" : state.down ? "descending" : "ascending"),
    );
    heads.forEach((head, i) => (head.querySelector("span").textContent = i !== state.by ? "" : state.down ? " ▾" : " ▴"));
    const count = formatCount(state.order.length);
    const found = view.query ? `${count} of ${formatCount(model.names.length)} tensors` : "";
    byId("found").textContent = found;
    byId("table-note").textContent = found || model.names.length ? `${plural(model.names.length, "tensor")}; choose one to see it in the map` : "";
    byId("tensor-table").setAttribute("aria-rowcount", state.order.length + 1);
    scroller.classList.toggle("few", state.order.length <= FEW);
    scroller.scrollTop = 0;
    state.at = 0;
    draw();
  }
  function chosen() {
    const place = state.order.indexOf(view.tensor);
    if (place >= 0) intoView(place, state, scroller);
    draw();
  }
  scroller.addEventListener("scroll", draw);
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-place]");
    if (!row) return;
    state.at = Number(row.dataset.place);
    view.choose(state.order[state.at]);
  });
  body.addEventListener("keydown", (event) => rowKeys(event, state, scroller, draw, view));
  view.on("search", again);
  view.on("tensor", chosen);
  new ResizeObserver(draw).observe(scroller);
  again();
}

function headCell(column, sort) {
  const button = node("button", { type: "button", title: `Sort by ${column.head.toLowerCase()}` }, column.head, node("span", { "aria-hidden": "true" }));
  button.addEventListener("click", sort);
  return node("th", { scope: "col", class: column.text ? "text" : null }, button);
}

function intoView(place, state, scroller) {
  state.at = place;
  const top = place * ROW;
  const room = scroller.clientHeight - ROW - 6; // the head covers a row
  if (top < scroller.scrollTop || top + ROW > scroller.scrollTop + room) scroller.scrollTop = top - room / 2;
}

function drawRows(model, view, columns, state, scroller, body) {
  const count = state.order.length;
  const first = Math.max(0, Math.min(Math.floor(scroller.scrollTop / ROW) - 5, count - 1));
  const last = Math.min(count, first + Math.ceil(Math.max(scroller.clientHeight, FEW * ROW) / ROW) + 12);
  const space = (rows) => {
    const cell = node("td", { colspan: columns.length });
    cell.style.height = `${rows * ROW}px`;
    return node("tr", { class: "space", "aria-hidden": "true" }, cell);
  };
  const hadFocus = body.contains(document.activeElement);
  const made = [];
  if (first > 0) made.push(space(first));
  for (let place = first; place < last; place += 1) made.push(tableRow(view, columns, state, place));
  if (last < count) made.push(space(count - last));
  if (!count) made.push(node("tr", {}, node("td", { class: "text", colspan: columns.length }, model.names.length ? "No tensor's name or kind has that in it." : "No op touches a tensor.")));
  body.replaceChildren(...made);
  if (hadFocus) body.querySelector('tr[tabindex="0"]')?.focus({ preventScroll: true });
}

function tableRow(view, columns, state, place) {
  const tensor = state.order[place];
  const cells = columns.map((column, index) => {
    const value = column.value(tensor);
    const text = column.show ? column.show(value) : value;
    const kind = index === 0 ? "text name" : column.text ? "text" : null;
    return node("td", { class: kind, title: index === 0 ? text : null }, text);
  });
  return node(
    "tr",
    {
      "data-place": place,
      "aria-rowindex": place + 2,
      "aria-selected": tensor === view.tensor ? "true" : "false",
      tabindex: place === state.at ? "0" : "-1",
    },
    ...cells,
  );
}

/** Up and down move between rows, Enter and the space bar choose one. */
function rowKeys(event, state, scroller, draw, view) {
  const page = Math.max(1, Math.floor(scroller.clientHeight / ROW) - 2);
  const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page };
  if (event.key in steps) {
    const place = Math.min(Math.max(0, state.at + steps[event.key]), state.order.length - 1);
    intoView(place, state, scroller);
    draw();
  } else if (event.key === "Enter" || event.key === " ") {
    view.choose(state.order[state.at]);
  } else {
    return;
  }
  event.preventDefault();
  event.stopPropagation();
}
