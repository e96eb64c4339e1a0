"""What models compute by on CUDA: Triton kernels, chosen matmul algorithms, attention."""
