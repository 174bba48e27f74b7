"""Train a small language model twice, with the plain all-reduce and with DynamiQ, and compare."""
