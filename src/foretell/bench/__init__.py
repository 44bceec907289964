"""Benchmarks: speed beside a lossless column, in one run, with what is needed to repeat it."""
