"""`dsx bench convergence`: how much each method loses against synchronous data parallel."""
