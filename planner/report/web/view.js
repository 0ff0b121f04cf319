// What is looked at: the range of time, the cursor, the tensor that is chosen, the search. Whoever
// draws listens; nobody else keeps a copy.

function makeView(length) {
  const listeners = new Map();
  const view = {
    min: 0,
    max: length,
    cursor: null, // µs
    tensor: -1,
    query: "",
    on(what, listener) {
      if (!listeners.has(what)) listeners.set(what, []);
      listeners.get(what).push(listener);
    },
    tell(what) {
      for (const listener of listeners.get(what) ?? []) listener();
    },
    /** Shows [min, max], kept within the iteration and not shorter than a billionth of it. */
    show(min, max) {
      const width = Math.min(length, Math.max(max - min, length * 1e-9, 1e-3));
      const begin = Math.min(Math.max(0, min), length - width);
      if (begin === view.min && begin + width === view.max) return;
      view.min = begin;
      view.max = begin + width;
      view.tell("range");
    },
    /** `factor` < 1 zooms in; what is at `around` stays where it is. */
    zoom(factor, around) {
      const centre = around ?? view.centre();
      view.show(centre - (centre - view.min) * factor, centre + (view.max - centre) * factor);
    },
    pan(share) {
      const width = view.max - view.min;
      view.show(view.min + share * width, view.max + share * width);
    },
    reset: () => view.show(0, length),
    /** The cursor if it is to be seen, else the middle. */
    centre() {
      const seen = view.cursor !== null && view.cursor >= view.min && view.cursor <= view.max;
      return seen ? view.cursor : (view.min + view.max) / 2;
    },
    point(us) {
      view.cursor = us;
      view.tell("cursor");
    },
    choose(tensor) {
      view.tensor = view.tensor === tensor ? -1 : tensor;
      view.tell("tensor");
    },
    search(text) {
      view.query = text.trim().toLowerCase();
      view.tell("search");
    },
  };
  return view;
}
