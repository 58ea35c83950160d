"""The scheduler service: the only brain. Owns no tensor and imports no torch."""
