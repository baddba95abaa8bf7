"""The link between clusters, measured without training: `dsx net-test`."""
