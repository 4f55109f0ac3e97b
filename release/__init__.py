"""What `make release`, `make wheels` and `make audit` run: artefacts in build, without Docker."""
