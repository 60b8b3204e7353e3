"""What a run gives away about rows, measured: rows in an upload, membership, canaries, and the mechanism."""
