"""The scheduler's brain: a pure state machine.

No clock, no randomness, no I/O, no grpc, no torch: inputs are frozen values, time is an argument in
integer microseconds, and the same inputs give the same decisions, byte for byte.
"""
