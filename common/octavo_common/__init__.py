"""What engine, router, operator and facade would each write alike: standard library only."""
