"""What users write: the signal-group YAML, read and checked. Knows nothing about torch."""
