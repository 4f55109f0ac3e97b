"""Model families, each a page over the operations of `octavo_engine.ops`."""
