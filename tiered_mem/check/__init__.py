"""Whether a machine does what the library counts on: checks of its device, its host memory and a drive."""
