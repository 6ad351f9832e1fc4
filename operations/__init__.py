"""pyinfra operations, one module a stage: read the observation, ask the core for the changes, yield its commands."""
