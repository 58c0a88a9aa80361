"""Preloading of shared libraries: none are needed, since the native module finds its own."""
