"""`octavo bundle`: images, chart, SBOMs and models as one OCI image layout."""
