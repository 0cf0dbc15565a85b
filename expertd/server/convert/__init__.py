"""From each API's body to a `Conversation`."""
