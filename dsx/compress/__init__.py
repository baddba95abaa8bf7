"""What is sent for a pseudo-gradient: compressors are generators and know no network."""
