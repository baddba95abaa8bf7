"""`dsx bench torchft`: torchft's DiLoCo beside dsx's, on the same slow line of this host."""
