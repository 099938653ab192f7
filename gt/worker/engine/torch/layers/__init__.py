"""Layers whose kernel depends on the device: attention, norms in half precision, recurrent layers."""
