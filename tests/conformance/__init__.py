"""torch's own operator tests as ours: every op of its OpInfo database on `remote`, whole and split, against plain torch."""
