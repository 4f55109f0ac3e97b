"""What `make wheels` and `make audit` run: artefacts in build/dist, without Docker."""
