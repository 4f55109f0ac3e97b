"""Where a request goes: facts in, decision out; nothing here touches a socket."""
