"""From deltas to bytes: one renderer for each API's shape, streamed and whole."""
