"""Between clusters: who is where, how they meet, and how a mean gets from one to the other."""
