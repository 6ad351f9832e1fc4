"""pyinfra facts: run a node script, parse what it says into the core's types."""
