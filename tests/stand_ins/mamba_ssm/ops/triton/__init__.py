"""Names as in the package."""
