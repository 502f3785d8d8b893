"""What the engine does otherwise on a CUDA device: an own decode kernel, and captured graphs."""
