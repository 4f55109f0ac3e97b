"""The core as a supervised process: messages, clients, heartbeat, restarts."""
