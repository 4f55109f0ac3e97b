"""What `make wheels` runs: artefacts in build/dist, without Docker."""
