"""Training steps as people write them: a function that does everything, traced once as it stands."""
