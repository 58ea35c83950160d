"""The scheduler's core on a simulated clock, with simulated workers: what a load would see.

Owns arrivals, clock and figures; every decision is the core's. Imports no grpc and no torch.
"""
