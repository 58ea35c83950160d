"""Measurements: load generators and their reports. Talks to services as any client does."""
