"""A timeline as tracks of ui.perfetto.dev."""
