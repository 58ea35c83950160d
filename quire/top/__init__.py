"""What `quire top` consists of: samples over gRPC, a history of them, frames, and the terminal."""
