"""The `quartet` command: `main` has the group, `options` what commands share."""
