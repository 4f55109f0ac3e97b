"""Several engine cores behind one API server: data parallelism inside an engine."""
