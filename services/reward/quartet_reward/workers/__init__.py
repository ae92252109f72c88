"""Killable worker processes: `pool` and `process` on the service's side, one module for each kind of worker."""
