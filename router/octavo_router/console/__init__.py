"""The page at `/`: engines, requests and a place to talk, live. Shows no prompt and no answer."""
