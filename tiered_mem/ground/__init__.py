"""What every other part stands on: the manager's lock, interrupts that wait, counters, and checks of arguments."""
