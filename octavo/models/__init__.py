"""Models on this machine: a catalogue of short names, the files that are here, running servers."""
