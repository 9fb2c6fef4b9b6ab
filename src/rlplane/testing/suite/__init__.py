"""The checks, one file per subject of the contract. ``rlplane.testing.checks()`` lists them."""
