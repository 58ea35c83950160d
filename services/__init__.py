"""The three services. They never import one another; they meet in `quire.v1`."""
