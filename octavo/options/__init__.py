"""Command-line flags, environment variables and files, and the settings that they become."""
