"""A timeline as tracks of ui.perfetto.dev, alone or beside a profiler's recording."""
