"""A run, or several beside each other, as one HTML file (`dsx report --html`)."""
