"""The passes that turn a joint graph into loops over sequence chunks, and the op rules."""
