"""One file per room: cases(shape, rows, dtype, device) yields what to measure, with its peers."""
