"""How models write reasoning and tool calls: text in as it comes, events out. Pure."""
