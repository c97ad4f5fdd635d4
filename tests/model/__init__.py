"""A naive model of the manager, virtual tensors, and the driver that runs both against the real one."""
