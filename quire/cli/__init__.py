"""The `quire` command: what a person types and reads. Knows services only as processes and rpcs."""
