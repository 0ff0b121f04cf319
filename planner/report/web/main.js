// Reads the data, then builds the page from top to bottom.

function showWindow(view, length) {
  const part = byId("window-part");
  part.style.left = `${(100 * view.min) / length}%`;
  part.style.width = `${(100 * (view.max - view.min)) / length}%`;
}

async function start() {
  const model = makeModel(await readPayload());
  const view = makeView(model.length);
  document.documentElement.dataset.theme = systemTheme();
  readColours();
  makeHead(model);
  makeMemory(model, view);
  makeLanes(model, view);
  const map = makeMap(model, view);
  makePolicies(model);
  makeTable(model, view);
  makeKeys(model, view, map);
  view.on("range", () => {
    showWindow(view, model.length);
    memoryReadout(model, view);
  });
  showWindow(view, model.length);
  makeAddress(model, view);
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  byId("trouble").textContent = `The report cannot be drawn: ${error.message}`;
  byId("trouble").hidden = false;
  throw error;
});
