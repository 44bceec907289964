"""Contexts longer than one device: keys and values sharded by position over ranks that exchange what
attention needs."""
