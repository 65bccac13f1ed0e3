"""Every engine against one contract, on real gloo ranks."""
