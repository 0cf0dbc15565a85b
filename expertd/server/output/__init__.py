"""From the model's raw text to what a client sees: content, reasoning and tool calls, incrementally."""
