// What is looked at, in the page's address: a link shows the same view. #from=…&to=… in µs, q, tensor
// by its number in the trace, theme.

const systemTheme = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

/** Takes over what the address says, and keeps it true from then on. */
function makeAddress(model, view) {
  let theme = null; // as the system has it
  const root = document.documentElement;

  function dress() {
    root.dataset.theme = matchMedia("print").matches ? "light" : (theme ?? systemTheme());
    readColours();
    redrawAll();
  }

  function read() {
    const said = new URLSearchParams(location.hash.slice(1));
    const [from, to] = [Number(said.get("from") ?? 0), Number(said.get("to") ?? model.length)];
    if (Number.isFinite(from) && Number.isFinite(to) && to > from) view.show(from, to);
    const query = said.get("q") ?? "";
    byId("search").value = query;
    view.search(query);
    const tensor = said.has("tensor") ? model.tensor_id.indexOf(Number(said.get("tensor"))) : -1;
    if (tensor !== view.tensor) view.choose(tensor < 0 ? view.tensor : tensor);
    theme = ["dark", "light"].includes(said.get("theme")) ? said.get("theme") : null;
    dress();
  }

  function write() {
    const says = new URLSearchParams();
    if (view.min > 0 || view.max < model.length) {
      says.set("from", view.min.toFixed(3));
      says.set("to", view.max.toFixed(3));
    }
    if (view.query) says.set("q", view.query);
    if (view.tensor >= 0) says.set("tensor", model.tensor_id[view.tensor]);
    if (theme) says.set("theme", theme);
    const hash = says.size ? `#${says}` : location.pathname + location.search;
    history.replaceState(null, "", hash);
  }

  view.toggleTheme = () => {
    theme = root.dataset.theme === "dark" ? "light" : "dark";
    dress();
    write();
  };
  read();
  let waiting = 0;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(write, 150); // browsers refuse a hundred changes in a row
  };
  for (const what of ["range", "search", "tensor"]) view.on(what, soon);
  addEventListener("hashchange", read);
  byId("theme").addEventListener("click", view.toggleTheme);
  for (const media of [matchMedia("(prefers-color-scheme: dark)"), matchMedia("print")]) {
    media.addEventListener("change", dress);
  }
}
