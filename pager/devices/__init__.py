"""The arena, and all streams and events, of one device."""
