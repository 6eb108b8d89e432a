"""The passes that turn a joint graph into loops over sequence chunks, and the op rules."""

from streambp_fx import ops as ops  # registers the ops that the passes name
