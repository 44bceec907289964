"""Draft heads: small networks that read the target's states, for inference and for training alike.

One file per family, in its public checkpoint layout; `layers.py` holds what they share.
"""
