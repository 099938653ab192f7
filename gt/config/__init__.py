"""Configs: the YAML of signal groups, parsed and checked. Knows nothing about torch."""
