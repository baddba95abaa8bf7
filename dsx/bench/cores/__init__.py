"""What coding on a number of cores gives, and costs training: `dsx bench cores`."""
