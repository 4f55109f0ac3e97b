"""`octavo chat` and `octavo complete`: the dialogue in the terminal and its back ends."""
