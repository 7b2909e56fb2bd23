"""Expert parallelism: how a MoE layer's tokens reach their experts."""
