"""What layers save for backward: blocks that leave the device and come back as a policy says."""
