"""Compiled code of segments by Inductor: what it is given, how its results are used, and where it is kept."""
