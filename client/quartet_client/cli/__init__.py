"""The `quartet` command: `main` has the group, `options` what commands share, `output` how they print."""
