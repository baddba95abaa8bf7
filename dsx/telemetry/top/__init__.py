"""`dsx top`: a run that goes on, as a table in a terminal."""
