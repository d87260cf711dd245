"""What kernels are verified with: comparison of bytes, and inputs that show what a kernel does otherwise."""
