"""How a plan is computed: its tensors, the forward, the draw."""
