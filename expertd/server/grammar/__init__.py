"""GBNF from JSON schemas, and the frames that hold it: tool calls, thinking first, harmony channels."""
